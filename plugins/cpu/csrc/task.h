// A task: one kernel with its arguments, cut into chunks that any thread may run in any order.
//
// A kernel is compiled once for each level of instruction sets (see levels.h) and called through this table alone, so
// that nothing but the level's own translation units needs the level's compiler flags.
#pragma once

#include <cstdint>

namespace hardpoint {

// One argument. What it holds says the kernel's signature: 'p' a pointer, 'i' an integer, 'f' a real number.
union Slot {
    void* pointer;
    std::int64_t integer;
    double real;
};

constexpr int kMaxArguments = 32;

// Whether what this thread runs may multiply by matrix tiles (see kernels/tiles.h): its kernel is one of a level that has
// them. Levels with and without tiles share their compiled code.
inline constinit thread_local bool tiles_allowed = false;

struct Kernel {
    const char* name;
    const char* signature;  // one letter per argument
    std::int64_t (*count_chunks)(const Slot* arguments);
    void (*run_chunk)(const Slot* arguments, std::int64_t chunk);
    bool tiles = false;  // see tiles_allowed

    std::int64_t chunks(const Slot* arguments) const {
        tiles_allowed = tiles;
        return count_chunks(arguments);
    }
    void run(const Slot* arguments, std::int64_t chunk) const {
        tiles_allowed = tiles;
        run_chunk(arguments, chunk);
    }
};

// A kernel out of a struct of arguments: eight bytes each, in the order of its `signature`, with the members
// `std::int64_t chunks() const` and `void run(std::int64_t chunk) const`. `chunks` is asked when a list starts to run:
// it may read memory that was written before that, and nothing that the list itself computes.
template <typename Arguments>
constexpr Kernel kernel(const char* name) {
    static_assert(sizeof(Arguments::signature) - 1 <= kMaxArguments);
    static_assert(sizeof(Arguments) == 8 * (sizeof(Arguments::signature) - 1), "one letter for each argument");
    return {
        name,
        Arguments::signature,
        [](const Slot* slots) { return reinterpret_cast<const Arguments*>(slots)->chunks(); },
        [](const Slot* slots, std::int64_t chunk) { reinterpret_cast<const Arguments*>(slots)->run(chunk); },
    };
}

// The kernels of one family, from one translation unit.
struct Family {
    const Kernel* kernels;
    int count;
};

template <int count>
constexpr Family family(const Kernel (&kernels)[count]) {
    return {kernels, count};
}

struct Task {
    const Kernel* kernel;
    Slot arguments[kMaxArguments];
};

}  // namespace hardpoint
