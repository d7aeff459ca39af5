#include "levels.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// The build defines HARDPOINT_LEVELS: for each level that the compiler knows, best first, an X(level, families), where
// families are an F(made_for, family) for each file csrc/kernels/FAMILY.cpp: `amx` has those of another level.
#define F(made_for, family)              \
    namespace hardpoint::made_for {      \
    extern const Family family##_family; \
    }
#define X(level, families) families
HARDPOINT_LEVELS
#undef X
#undef F

namespace hardpoint {
namespace {

bool supports_plain() { return true; }
#if defined(__x86_64__)
bool supports_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool supports_avx512() {
    return supports_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool supports_avx512_vnni() { return supports_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool supports_avx512_bf16() { return supports_avx512_vnni() && __builtin_cpu_supports("avx512bf16"); }

#if defined(HARDPOINT_EMULATE_TILES)
bool supports_amx() { return true; }
#else
bool cpu_has_tiles() {
    constexpr unsigned kBfloat16 = 1u << 22, kTiles = 1u << 24, kInt8 = 1u << 25;  // leaf 7, EDX
    constexpr unsigned kWanted = kBfloat16 | kTiles | kInt8;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kWanted) == kWanted;
}

// Tiles are state that Linux keeps for processes alone that asked for it (its documentation, arch/x86/xstate.rst), all
// threads of one at once. Refused by older kernels, some sandboxes, and where a thread's stack for signals is too
// small.
bool may_use_tiles() {
#if defined(__linux__)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

bool supports_amx() { return supports_avx512_bf16() && cpu_has_tiles() && may_use_tiles(); }
#endif
#endif

// Every level that there is, best first, as in LEVELS of setup.py.
#if defined(__x86_64__)
#define HARDPOINT_ALL_LEVELS X(amx) X(avx512_bf16) X(avx512_vnni) X(avx512) X(avx2) X(plain)
#else
#define HARDPOINT_ALL_LEVELS X(plain)
#endif

// Whether kernels of a level may multiply by matrix tiles.
bool has_tiles(const char* level) { return std::strcmp(level, "amx") == 0; }

std::vector<Level> find_levels() {
    std::vector<Level> found;
    std::vector<Kernel> kernels;
    const auto add = [&](const Family& family) {
        kernels.insert(kernels.end(), family.kernels, family.kernels + family.count);
    };
#define F(made_for, family) add(made_for::family##_family);
#define X(level, families)                                                        \
    if (supports_##level()) {                                                     \
        kernels.clear();                                                          \
        families for (Kernel& kernel : kernels) kernel.tiles = has_tiles(#level); \
        found.push_back({#level, kernels});                                       \
    }
    HARDPOINT_LEVELS
#undef X
#undef F
    return found;
}

}  // namespace

const std::vector<Level>& levels() {
    static const std::vector<Level> found = find_levels();
    return found;
}

const std::vector<const char*>& cpu_levels() {
#define X(level) \
    if (supports_##level()) names.push_back(#level);
    static const std::vector<const char*> found = [] {
        std::vector<const char*> names;
        HARDPOINT_ALL_LEVELS
        return names;
    }();
#undef X
    return found;
}

const std::vector<const char*>& built_levels() {
#define X(level, families) #level,
    static const std::vector<const char*> names = {HARDPOINT_LEVELS};
#undef X
    return names;
}

}  // namespace hardpoint
