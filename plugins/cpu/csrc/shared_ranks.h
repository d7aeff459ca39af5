// Collectives of the ranks of one host, over memory that they share.
//
// Every rank has a mailbox with two halves. A collective is one or more phases, which all ranks go through in step: a
// rank writes to its own half, publishes the phase's number, waits until all others have, and reads their halves. Phases
// take the halves in turn. A rank that sees the number n + 1 of another knows that it has read phase n, so what was
// published two phases ago may be overwritten, and a phase costs one wait.
//
// Messages between two ranks (`send`, `receive`) have a channel for each pair and direction, of two pieces.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <vector>

#include "task.h"

namespace hardpoint {

// Why a collective ended early: another rank left, died, kept it waiting for too long or called something else.
struct BrokenOff : std::runtime_error {
    using std::runtime_error::runtime_error;
};

using Sizes = std::vector<std::int64_t>;

class SharedRanks {
  public:
    // Bytes of the memory of so many ranks. It must be zeros when they meet.
    static std::size_t bytes(int world);

    // Map the file `descriptor`, which all ranks have opened. Waits are given up after so many seconds.
    SharedRanks(int descriptor, int world, int rank, double seconds);
    ~SharedRanks();
    SharedRanks(const SharedRanks&) = delete;
    SharedRanks& operator=(const SharedRanks&) = delete;

    // Wait until all ranks are here, and keep an eye on their processes from then on.
    void meet();
    int world() const { return world_; }
    // From any thread: calls under way, and later ones, throw BrokenOff; those of other ranks too.
    void leave();

    // x = the sum over ranks, by the kernel `rank_sum`.
    void all_reduce(const Kernel& sum, char* x, std::int64_t elements, std::int64_t element_bytes);
    // out = x of all ranks, of so many bytes each.
    void all_gather(const char* x, char* out, const Sizes& bytes);
    // out = of the sum over ranks of x this rank's share; shares have so many elements each.
    void reduce_scatter(
        const Kernel& sum, const char* x, char* out, const Sizes& elements, std::int64_t element_bytes);
    // Send each rank its bytes of x; out = what all sent here.
    void all_to_all(const char* x, char* out, const Sizes& sent, const Sizes& received);
    // The same where nobody knows yet what comes: `place` is told, and says where to.
    void all_to_all(const char* x, const Sizes& sent, const std::function<char*(const Sizes&)>& place);
    void broadcast(char* x, std::int64_t bytes, int root);
    void send(const char* x, std::int64_t bytes, int to);
    void receive(char* x, std::int64_t bytes, int source);

  private:
    struct Word;
    struct Mailbox;
    struct Channel;
    struct Call;

    Mailbox& mailbox(int rank) const;
    char* half(int rank, std::uint32_t phase) const;
    std::int64_t* counts(int rank, std::uint32_t phase) const;
    Channel& channel(int source, int to) const;

    void phase(const Call& call);  // publish what was written to the next half, and wait for the others
    void post(Word& word, std::uint32_t value);
    template <typename Reached>
    void await(Word& word, int rank, Reached reached);
    void look_around(int awaited, double waited);  // throws if there is no point in waiting further
    void check_here() const;
    void sum_up(const Kernel& sum, char* out, std::int64_t elements);

    char* memory_ = nullptr;
    std::size_t size_ = 0;
    int world_, rank_;
    double seconds_;
    std::uint32_t next_ = 1;               // the number of the phase whose half is to be written
    std::vector<int> processes_;           // descriptors of the other ranks' processes; -1: this one, or unknown
    std::vector<std::uint32_t> sent_, got_;  // pieces, by rank
    std::vector<const void*> parts_;       // what a sum adds up, by rank
    std::atomic<bool> left_{false};
};

}  // namespace hardpoint
