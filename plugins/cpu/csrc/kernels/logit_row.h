// One row of logits: its highest values and sums over them, without sorting the vocabulary.
//
// A row is looked at in blocks. The first pass keeps each block's highest logit; those after it pass over blocks
// without a logit of interest. Sums are taken in one order and in double precision, so that they depend on the row
// alone.
#pragma once

#include <algorithm>
#include <vector>

#include "chunking.h"
#include "vector.h"

namespace hardpoint::HARDPOINT_LEVEL {

constexpr std::int64_t kBlock = 128;
static_assert(kBlock % kLanes == 0);

// Types of this level, and so are the standard library's templates over them: the linker would merge those over `float`
// with other levels', and keep the one with the wrong instructions.
struct Logit {
    float value;
    std::int64_t token;
};
struct Block {
    float highest;
    double mass;
};

// Memory of one thread, kept from row to row.
struct Scratch {
    std::vector<Block> blocks;
    std::vector<Logit> found;
};

inline bool any(Ints chosen) {
    std::int32_t all = 0;
    for (int lane = 0; lane < kLanes; ++lane) all |= chosen[lane];
    return all != 0;
}

// Highest first, of equals the first of the vocabulary.
inline bool is_before(const Logit& a, const Logit& b) {
    return a.value > b.value || (a.value == b.value && a.token < b.token);
}

// Logits [n] divided by a temperature. NaN is neither above nor below anything.
template <typename T>
class LogitRow {
  public:
    LogitRow(const T* logits, std::int64_t n, float temperature, Scratch& scratch)
        : logits_(logits), n_(n), temperature_(temperature), blocks_(scratch.blocks), found_(scratch.found) {
        blocks_.resize(ceil_div(n, kBlock));
        for (std::int64_t number = 0; number < num_blocks(); ++number) {
            Floats high = broadcast(-__builtin_inff());
            each_vector(number, [&](std::int64_t, Floats x) { high = x > high ? x : high; });
            blocks_[number].highest = largest(high);
            highest_ = std::max(highest_, blocks_[number].highest);
        }
    }

    float highest() const { return highest_; }
    std::int64_t size() const { return n_; }

    // visit(token, x) for each logit of `least` or above, in the order of the vocabulary.
    template <typename Visit>
    void each_from(float least, Visit visit) const {
        each_vector_from(least, [&](std::int64_t first, Floats x) {
            const Ints chosen = x >= least;
            if (!any(chosen)) return;
            for (int lane = 0; lane < kLanes; ++lane) {
                if (chosen[lane]) visit(first + lane, x[lane]);
            }
        });
    }

    // The k highest logits (0 < k), highest first, of equals the first of the vocabulary; fewer where there are only so
    // many numbers. Valid until the next call.
    const std::vector<Logit>& top(std::int64_t k) const {
        // As many blocks as k have a logit of `least` or above: so have as many logits.
        float least = -__builtin_inff();
        if (k <= num_blocks()) {
            found_.clear();
            for (const Block& block : blocks_) found_.push_back({block.highest, 0});
            std::nth_element(found_.begin(), found_.begin() + (k - 1), found_.end(), is_before);
            least = found_[k - 1].value;
        }
        found_.clear();
        each_from(least, [&](std::int64_t token, float x) { found_.push_back({x, token}); });
        const auto count = std::min<std::int64_t>(k, static_cast<std::int64_t>(found_.size()));
        std::partial_sort(found_.begin(), found_.begin() + count, found_.end(), is_before);
        found_.resize(count);
        return found_;
    }

    // The sum of e^(x - highest) over the logits from `least` on.
    double mass(float least) const {
        double total = 0;
        for (std::int64_t number = 0; number < num_blocks(); ++number) {
            Floats sums = {};
            if (blocks_[number].highest >= least) {
                each_vector(number, [&](std::int64_t, Floats x) { sums += weights(x, least); });
            }
            blocks_[number].mass = 0;
            for (int lane = 0; lane < kLanes; ++lane) blocks_[number].mass += sums[lane];
            total += blocks_[number].mass;
        }
        return total;
    }

    // The lowest logit, of those from `least` on, that top_p (below 1) keeps: all above it together weigh less than
    // that share. Found in a histogram of weights, then by sorting one of its bins.
    float nucleus(float least, float top_p) const {
        if (!(top_p > 0)) return highest_;
        const double total = mass(least), wanted = top_p * total;
        // All below it together weigh at most half of what top_p leaves out.
        const double reach = std::log(2.0 * static_cast<double>(n_) / ((1.0 - top_p) * total));
        const float low = std::max(least, highest_ - static_cast<float>(reach)), range = highest_ - low;
        if (!(range > 0)) return highest_;
        constexpr int kBins = 1024;
        const auto bin_of = [=, this](float x) {
            const float bin = (highest_ - x) * (kBins / range);  // infinite or NaN where the range is tiny: the last one
            return bin < kBins - 1 ? static_cast<int>(bin) : kBins - 1;
        };
        double masses[kBins] = {};
        each_vector_from(low, [&](std::int64_t, Floats x) {
            const Ints chosen = x >= low;
            if (!any(chosen)) return;
            const Floats weight = weights(x, low);
            for (int lane = 0; lane < kLanes; ++lane) {
                if (chosen[lane]) masses[bin_of(x[lane])] += weight[lane];
            }
        });
        double above = 0;
        int bin = 0;
        while (bin < kBins && above + masses[bin] < wanted) above += masses[bin++];
        if (bin == kBins) return low;
        found_.clear();
        const float edge = highest_ - range / kBins * static_cast<float>(bin + 2);  // one more: rounding moves edges
        each_from(bin == kBins - 1 ? low : std::max(low, edge), [&](std::int64_t token, float x) {
            if (bin_of(x) == bin) found_.push_back({x, token});
        });
        std::sort(found_.begin(), found_.end(), is_before);
        float kept = low;
        for (std::size_t i = 0; i < found_.size() && above < wanted;) {
            kept = found_[i].value;
            const double weight = weights(broadcast(kept), low)[0];
            for (; i < found_.size() && found_[i].value == kept; ++i) above += weight;
        }
        return kept;
    }

    // Of the logits from `least` on: the first, in the order of the vocabulary, up to which their weights add up to
    // more than the share `uniform` of all.
    std::int64_t draw(float least, float uniform) const {
        const double target = uniform * mass(least);
        double before = 0, sum = 0;
        std::int64_t chosen = 0;  // the last one with any weight, where rounding leaves none above the target
        for (std::int64_t number = 0; number < num_blocks() && sum <= target; ++number) {
            if (blocks_[number].mass == 0) continue;
            chosen = number;
            before = sum;
            sum += blocks_[number].mass;
        }
        std::int64_t token = chosen * kBlock;
        bool found = false;
        each_vector(chosen, [&](std::int64_t first, Floats x) {
            const Floats weight = weights(x, least);
            for (int lane = 0; lane < kLanes && !found; ++lane) {
                if (weight[lane] == 0.0f) continue;
                token = first + lane;
                before += weight[lane];
                found = before > target;
            }
        });
        return token;
    }

    // How many logits are above x.
    std::int64_t count_above(float x) const {
        std::int64_t count = 0;
        each_vector_from(x, [&](std::int64_t, Floats y) {
            const Ints above = y > x;  // -1 where true
            for (int lane = 0; lane < kLanes; ++lane) count -= above[lane];
        });
        return count;
    }

  private:
    std::int64_t num_blocks() const { return static_cast<std::int64_t>(blocks_.size()); }

    // visit(first, x) for the vectors of a block: x holds the logits of the tokens from `first` on, NaN behind the
    // last.
    template <typename Visit>
    void each_vector(std::int64_t number, Visit visit) const {
        const std::int64_t end = std::min(n_, (number + 1) * kBlock);
        std::int64_t i = number * kBlock;
        for (; i + kLanes <= end; i += kLanes) visit(i, load(logits_ + i) / temperature_);
        if (i < end) {
            T rest[kLanes];
            for (T& x : rest) x = round_to<T>(__builtin_nanf(""));
            std::memcpy(rest, logits_ + i, (end - i) * sizeof(T));
            visit(i, load(rest) / temperature_);
        }
    }

    template <typename Visit>
    void each_vector_from(float least, Visit visit) const {
        for (std::int64_t number = 0; number < num_blocks(); ++number) {
            if (blocks_[number].highest >= least) each_vector(number, visit);
        }
    }

    // e^(x - highest) of the logits from `least` on, 0 of all others.
    Floats weights(Floats x, float least) const { return x >= least ? exponential(x - highest_) : Floats{}; }

    const T* logits_;
    std::int64_t n_;
    float temperature_, highest_ = -__builtin_inff();
    std::vector<Block>& blocks_;
    std::vector<Logit>& found_;
};

}  // namespace hardpoint::HARDPOINT_LEVEL
