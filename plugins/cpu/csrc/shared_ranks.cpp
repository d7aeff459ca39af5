#include "shared_ranks.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstring>
#include <string>
#include <system_error>

namespace hardpoint {
namespace {

// A half of a mailbox. Two ranks' stay in the second-level cache of most CPUs.
constexpr std::int64_t kHalfBytes = 256 * 1024;
constexpr std::int64_t kPieceBytes = 64 * 1024;
constexpr std::int64_t kLine = 64;
constexpr std::int64_t kPage = 4096;

// Up to here every rank reads all of every part, which takes one phase. Beyond, each sums a share, and reads the others'
// shares in a second phase: less is read, and by one rank only.
constexpr std::int64_t kOnePhaseBytes = 16 * 1024;

// A wait looks again at once for the first, gives the core to whoever wants it for the second, and then sleeps, waking
// every kSlice to see whether the awaited rank is still there. In seconds.
constexpr double kSpin = 5e-6, kYield = 100e-6, kSlice = 0.1;

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

constexpr std::int64_t round_up(std::int64_t a, std::int64_t to) { return (a + to - 1) / to * to; }
constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Of so many bytes in all, the piece that a round moves: [begin, begin + size), of at most `most`.
struct Piece {
    std::int64_t begin, size;
    Piece(std::int64_t all, std::int64_t round, std::int64_t most)
        : begin(std::min(all, round * most)), size(std::min(most, all - begin)) {}
};

std::int64_t total(const Sizes& sizes) {
    std::int64_t sum = 0;
    for (const auto size : sizes) sum += size;
    return sum;
}

std::int64_t largest(const Sizes& sizes) { return *std::max_element(sizes.begin(), sizes.end()); }

void copy(char* to, const char* from, std::int64_t bytes) {
    if (bytes) std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

std::string name_of(int rank) { return "rank " + std::to_string(rank); }

}  // namespace

// A number that one rank writes and others wait for. Other processes sleep on it: a futex that is not private.
struct SharedRanks::Word {
    std::atomic<std::uint32_t> value{0}, sleepers{0};

    void wake() { syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }
    void sleep(std::uint32_t seen, double seconds) {
        const timespec time{0, static_cast<long>(seconds * 1e9)};
        syscall(SYS_futex, &value, FUTEX_WAIT, seen, &time, nullptr, 0);
    }
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free);

// The call of a rank, so that others see that they call the same.
struct SharedRanks::Call {
    enum Kind : std::int64_t { kMeet, kAllReduce, kAllGather, kReduceScatter, kAllToAll, kBroadcast };
    std::int64_t kind, size;

    std::string text() const {
        static constexpr const char* names[] = {"the start", "all_reduce", "all_gather", "reduce_scatter",
                                                "all_to_all", "broadcast"};
        const bool known = kind >= 0 && kind <= kBroadcast;
        return std::string(known ? names[kind] : "?") + " of " + std::to_string(size) + " bytes";
    }
};

struct alignas(2 * kLine) SharedRanks::Mailbox {
    Word published;
    std::atomic<std::uint32_t> left;
    std::int32_t process;
    Call calls[2];
};

struct alignas(2 * kLine) SharedRanks::Channel {
    Word written;
    alignas(2 * kLine) Word read;
    alignas(2 * kLine) char pieces[2][kPieceBytes];
};

namespace {

// Where the parts of the memory begin.
struct Layout {
    std::int64_t counts, halves, channels, end;
    Layout(std::int64_t world, std::int64_t mailbox_bytes, std::int64_t channel_bytes)
        : counts(round_up(world * mailbox_bytes, kPage)),
          halves(round_up(counts + world * 2 * round_up(world * 8, kLine), kPage)),
          channels(halves + world * 2 * kHalfBytes),
          end(round_up(channels + world * world * channel_bytes, kPage)) {}
};

}  // namespace

std::size_t SharedRanks::bytes(int world) { return Layout(world, sizeof(Mailbox), sizeof(Channel)).end; }

SharedRanks::Mailbox& SharedRanks::mailbox(int rank) const {
    return reinterpret_cast<Mailbox*>(memory_)[rank];
}

std::int64_t* SharedRanks::counts(int rank, std::uint32_t phase) const {
    const Layout layout(world_, sizeof(Mailbox), sizeof(Channel));
    const auto place = 2 * rank + static_cast<int>(phase % 2);
    return reinterpret_cast<std::int64_t*>(memory_ + layout.counts + place * round_up(world_ * 8, kLine));
}

char* SharedRanks::half(int rank, std::uint32_t phase) const {
    const Layout layout(world_, sizeof(Mailbox), sizeof(Channel));
    return memory_ + layout.halves + (2 * rank + static_cast<int>(phase % 2)) * kHalfBytes;
}

SharedRanks::Channel& SharedRanks::channel(int source, int to) const {
    const Layout layout(world_, sizeof(Mailbox), sizeof(Channel));
    return reinterpret_cast<Channel*>(memory_ + layout.channels)[source * world_ + to];
}

SharedRanks::SharedRanks(int descriptor, int world, int rank, double seconds)
    : size_(bytes(world)),
      world_(world),
      rank_(rank),
      seconds_(seconds),
      processes_(world, -1),
      sent_(world, 0),
      got_(world, 0),
      parts_(world, nullptr) {
    void* mapped = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (mapped == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
    memory_ = static_cast<char*>(mapped);
    std::memset(half(rank, 0), 0, 2 * kHalfBytes);  // on this rank's node of memory
    mailbox(rank).process = getpid();
}

SharedRanks::~SharedRanks() {
    leave();
    for (const int process : processes_) {
        if (process >= 0) close(process);
    }
    munmap(memory_, size_);
}

void SharedRanks::meet() {
    phase({Call::kMeet, 0});
    for (int other = 0; other < world_; ++other) {
        const int process = mailbox(other).process;
        if (process == getpid()) continue;
#if defined(SYS_pidfd_open)
        processes_[other] = static_cast<int>(syscall(SYS_pidfd_open, process, 0));
        if (processes_[other] < 0 && errno == ESRCH) throw BrokenOff(name_of(other) + " has ended");
#endif
    }
}

void SharedRanks::leave() {
    left_ = true;
    mailbox(rank_).left = 1;
}

void SharedRanks::check_here() const {
    if (left_) throw BrokenOff("this rank has left its group");
}

void SharedRanks::look_around(int awaited, double waited) {
    check_here();
    for (int other = 0; other < world_; ++other) {
        pollfd one{processes_[other], POLLIN, 0};
        if (one.fd >= 0 && poll(&one, 1, 0) == 1) {
            throw BrokenOff(name_of(other) + " (process " + std::to_string(mailbox(other).process) + ") has ended");
        }
    }
    if (mailbox(awaited).left) throw BrokenOff(name_of(awaited) + " has left the group");
    if (waited > seconds_) {
        char text[80];
        std::snprintf(text, sizeof(text), "%s did not come within %g s", name_of(awaited).c_str(), seconds_);
        throw BrokenOff(text);
    }
}

void SharedRanks::post(Word& word, std::uint32_t value) {
    word.value.store(value);  // in one order with the count of sleepers, on both sides: one of them sees the other
    if (word.sleepers.load()) word.wake();
}

template <typename Reached>
void SharedRanks::await(Word& word, int rank, Reached reached) {
    const auto is_there = [&] { return reached(word.value.load(std::memory_order_acquire)); };
    if (is_there()) return;
    const auto start = Clock::now();
    for (double waited = 0; waited < kYield; waited = since(start)) {
        for (int look = 0; look < 32; ++look) {
            if (is_there()) return;
            relax();
        }
        if (waited > kSpin) sched_yield();
    }
    while (!is_there()) {
        word.sleepers.fetch_add(1);
        const auto seen = word.value.load();
        if (!reached(seen)) word.sleep(seen, kSlice);
        word.sleepers.fetch_sub(1);
        if (!is_there()) look_around(rank, since(start));
    }
}

void SharedRanks::phase(const Call& call) {
    check_here();
    const auto number = next_;
    Mailbox& own = mailbox(rank_);
    own.calls[number % 2] = call;
    post(own.published, number);
    for (int other = 0; other < world_; ++other) {
        if (other == rank_) continue;
        Mailbox& theirs = mailbox(other);
        await(theirs.published, other, [=](std::uint32_t seen) {
            return static_cast<std::int32_t>(seen - number) >= 0;
        });
        const Call& made = theirs.calls[number % 2];
        if (made.kind != call.kind || (made.size != call.size && call.kind != Call::kAllToAll)) {
            throw BrokenOff(
                name_of(rank_) + " is in " + call.text() + ", and " + name_of(other) + " in " + made.text());
        }
    }
    next_ = number + 1;
}

void SharedRanks::sum_up(const Kernel& sum, char* out, std::int64_t elements) {
    Slot slots[4];
    slots[0].pointer = parts_.data();
    slots[1].pointer = out;
    slots[2].integer = world_;
    slots[3].integer = elements;
    const auto chunks = sum.chunks(slots);
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) sum.run(slots, chunk);
}

void SharedRanks::all_reduce(const Kernel& sum, char* x, std::int64_t elements, std::int64_t element_bytes) {
    check_here();
    const Call call{Call::kAllReduce, elements * element_bytes};
    const auto per_round = kHalfBytes / element_bytes;
    for (std::int64_t round = 0; round < ceil_div(elements, per_round); ++round) {
        const Piece piece(elements, round, per_round);
        char* const mine = x + piece.begin * element_bytes;
        const auto bytes = piece.size * element_bytes;
        const auto written = next_;
        if (bytes <= kOnePhaseBytes) {
            copy(half(rank_, written), mine, bytes);
            phase(call);
            for (int other = 0; other < world_; ++other) parts_[other] = half(other, written);
            sum_up(sum, mine, piece.size);
            continue;
        }
        // Shares begin at whole lines, so that no two ranks write to one.
        const auto share = round_up(ceil_div(bytes, world_), kLine);
        const auto begin = [=](int rank) { return std::min(bytes, rank * share); };
        const auto size = [=](int rank) { return begin(rank + 1) - begin(rank); };
        const auto own = begin(rank_);
        copy(half(rank_, written), mine, own);
        copy(half(rank_, written) + own + size(rank_), mine + own + size(rank_), bytes - own - size(rank_));
        phase(call);
        for (int other = 0; other < world_; ++other) {
            parts_[other] = other == rank_ ? mine + own : half(other, written) + own;
        }
        sum_up(sum, half(rank_, written + 1) + own, size(rank_) / element_bytes);
        copy(mine + own, half(rank_, written + 1) + own, size(rank_));
        phase(call);
        for (int other = 0; other < world_; ++other) {
            if (other != rank_) copy(mine + begin(other), half(other, written + 1) + begin(other), size(other));
        }
    }
}

void SharedRanks::all_gather(const char* x, char* out, const Sizes& bytes) {
    check_here();
    const Call call{Call::kAllGather, total(bytes)};
    for (std::int64_t round = 0; round < ceil_div(largest(bytes), kHalfBytes); ++round) {
        const auto written = next_;
        const Piece own(bytes[rank_], round, kHalfBytes);
        copy(half(rank_, written), x + own.begin, own.size);
        phase(call);
        char* place = out;
        for (int other = 0; other < world_; ++other) {
            const Piece piece(bytes[other], round, kHalfBytes);
            copy(place + piece.begin, other == rank_ ? x + own.begin : half(other, written), piece.size);
            place += bytes[other];
        }
    }
}

void SharedRanks::reduce_scatter(
    const Kernel& sum, const char* x, char* out, const Sizes& elements, std::int64_t element_bytes) {
    check_here();
    const Call call{Call::kReduceScatter, total(elements) * element_bytes};
    const auto most = kHalfBytes / world_ / kLine * kLine;
    for (std::int64_t round = 0; round < ceil_div(largest(elements) * element_bytes, most); ++round) {
        const auto written = next_;
        const char* place = x;
        for (int other = 0; other < world_; ++other) {
            const Piece piece(elements[other] * element_bytes, round, most);
            if (other == rank_) {
                parts_[rank_] = place + piece.begin;
            } else {
                copy(half(rank_, written) + other * most, place + piece.begin, piece.size);
            }
            place += elements[other] * element_bytes;
        }
        phase(call);
        for (int other = 0; other < world_; ++other) {
            if (other != rank_) parts_[other] = half(other, written) + rank_ * most;
        }
        const Piece own(elements[rank_] * element_bytes, round, most);
        sum_up(sum, out + own.begin, own.size / element_bytes);
    }
}

void SharedRanks::all_to_all(const char* x, char* out, const Sizes& sent, const Sizes& received) {
    all_to_all(x, sent, [&](const Sizes& coming) {
        for (int other = 0; other < world_; ++other) {
            if (coming[other] == received[other]) continue;
            throw BrokenOff(
                name_of(other) + " sends " + std::to_string(coming[other]) + " bytes to " + name_of(rank_) +
                ", which expects " + std::to_string(received[other]));
        }
        return out;
    });
}

void SharedRanks::all_to_all(
    const char* x, const Sizes& sent, const std::function<char*(const Sizes&)>& place) {
    check_here();
    const Call call{Call::kAllToAll, largest(sent)};
    const auto most = kHalfBytes / world_ / kLine * kLine;
    const char* own = x;
    for (int other = 0; other < rank_; ++other) own += sent[other];
    Sizes received(world_, 0);
    char* out = nullptr;
    std::int64_t rounds = 1;  // the first says how many there are: nobody knows how much others send each other
    for (std::int64_t round = 0; round < rounds; ++round) {
        const auto written = next_;
        if (round == 0) std::copy(sent.begin(), sent.end(), counts(rank_, written));
        const char* from = x;
        for (int other = 0; other < world_; ++other) {
            const Piece piece(sent[other], round, most);
            if (other != rank_) copy(half(rank_, written) + other * most, from + piece.begin, piece.size);
            from += sent[other];
        }
        phase(call);
        if (round == 0) {
            for (int other = 0; other < world_; ++other) {
                rounds = std::max(rounds, ceil_div(mailbox(other).calls[written % 2].size, most));
                received[other] = counts(other, written)[rank_];
            }
            out = place(received);
        }
        char* to = out;
        for (int other = 0; other < world_; ++other) {
            const Piece piece(received[other], round, most);
            copy(to + piece.begin, other == rank_ ? own + piece.begin : half(other, written) + rank_ * most, piece.size);
            to += received[other];
        }
    }
}

void SharedRanks::broadcast(char* x, std::int64_t bytes, int root) {
    check_here();
    const Call call{Call::kBroadcast, bytes};
    for (std::int64_t round = 0; round < ceil_div(bytes, kHalfBytes); ++round) {
        const auto written = next_;
        const Piece piece(bytes, round, kHalfBytes);
        if (rank_ == root) copy(half(rank_, written), x + piece.begin, piece.size);
        phase(call);
        if (rank_ != root) copy(x + piece.begin, half(root, written), piece.size);
    }
}

void SharedRanks::send(const char* x, std::int64_t bytes, int to) {
    check_here();
    Channel& through = channel(rank_, to);
    for (std::int64_t round = 0; round < ceil_div(bytes, kPieceBytes); ++round) {
        const auto number = sent_[to];
        await(through.read, to, [=](std::uint32_t read) { return number - read < 2; });
        const Piece piece(bytes, round, kPieceBytes);
        copy(through.pieces[number % 2], x + piece.begin, piece.size);
        post(through.written, sent_[to] = number + 1);
    }
}

void SharedRanks::receive(char* x, std::int64_t bytes, int source) {
    check_here();
    Channel& through = channel(source, rank_);
    for (std::int64_t round = 0; round < ceil_div(bytes, kPieceBytes); ++round) {
        const auto number = got_[source];
        await(through.written, source, [=](std::uint32_t written) { return written != number; });
        const Piece piece(bytes, round, kPieceBytes);
        copy(x + piece.begin, through.pieces[number % 2], piece.size);
        post(through.read, got_[source] = number + 1);
    }
}

}  // namespace hardpoint
