// Selecting from a whole vector, by a range of magnitudes or the k of highest order.
//
// Exact top-k takes one pass. Candidates that reach a bound are collected; whenever there are far more than k, all but the k largest are
// dropped and the bound rises to the smallest of them. So any bound that k elements reach gives the right answer, in linear time; a
// good one, from the last step or from a sample, gives it at the speed of the pass. Where too few reach it, a lower one is taken.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "blocks.hpp"

namespace sparsync {

namespace {

constexpr int64_t kSpare = 65536;   // candidates beyond k before any are dropped, at least
constexpr int64_t kSample = 4096;   // elements looked at to find a bound
constexpr double kDeviations = 4.0;  // by which the count in a sample is taken to be off

// What may be among the k, and the bound that the rest of the vector has to reach.
class Candidates {
  public:
    Candidates(Found &found, Top wanted, int32_t bound) : found_(found), wanted_(wanted), bound_(bound) {}

    bool full() const { return full_; }
    Range range() const { return full_ ? kNone : Range{static_cast<uint32_t>(bound_), kMagnitude}; }
    int32_t bound() const { return bound_; }
    Sink room(int64_t elements) {
        found_.reserve(found_.count + elements);
        return found_.end();
    }
    void added(int64_t count) {
        found_.count += count;
        if (found_.count - wanted_.k >= std::max(wanted_.k, kSpare)) drop();
    }

  private:
    // What is level with the smallest kept comes later, so it is not wanted any more.
    void drop() {
        const uint32_t order = keep_top(found_, wanted_.k, wanted_.order);
        if (wanted_.order == Order::magnitude) {
            full_ = order == kInfinity;
            bound_ = static_cast<int32_t>(order + 1);
        } else {
            const auto number = static_cast<int32_t>(order ^ kSign);
            full_ = number == INT32_MAX;
            bound_ = full_ ? number : number + 1;
        }
    }

    Found &found_;
    Top wanted_;
    int32_t bound_;
    bool full_ = false;
};

int64_t length_of(const std::vector<Span> &spans) {
    int64_t total = 0;
    for (const Span &span : spans) total += span.stop - span.start;
    return total;
}

int32_t order_of(float value, Order order) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t magnitude = bits & kMagnitude;
    if (order == Order::magnitude) return static_cast<int32_t>(std::min(magnitude, kInfinity));
    return static_cast<int32_t>(bits & kSign ? -magnitude : magnitude);
}

// A bound that a little more than k elements reach, probably; `lowest` where a sample would not tell.
template <class At>
int32_t sampled_bound(const std::vector<Span> &spans, Top wanted, At value_at) {
    const int64_t n = length_of(spans);
    if (n < 16 * kSample || wanted.k > n / 4) return wanted.lowest;
    const int64_t stride = n / kSample | 1;  // odd, so that it does not walk down one column of a matrix
    std::vector<int32_t> sample;
    sample.reserve(static_cast<size_t>(n / stride + 1));
    int64_t next = 0;
    for (const Span &span : spans) {
        for (next += span.start; next < span.stop; next += stride) sample.push_back(order_of(value_at(next), wanted.order));
        next -= span.stop;
    }
    const double expected = static_cast<double>(sample.size()) * static_cast<double>(wanted.k) / static_cast<double>(n);
    const auto place = static_cast<int64_t>(expected + kDeviations * std::sqrt(expected) + 1);
    if (place >= static_cast<int64_t>(sample.size())) return wanted.lowest;
    std::nth_element(sample.begin(), sample.begin() + place, sample.end(), std::greater<int32_t>());
    return std::max(wanted.lowest, sample[static_cast<size_t>(place)]);
}

// Runs pass(candidates, start, length) over `spans`; whether enough was found.
template <class Pass>
bool collect(const std::vector<Span> &spans, Top wanted, int32_t bound, Found &found, Pass pass) {
    found.count = 0;
    Candidates candidates(found, wanted, bound);
    in_blocks(spans, [&](int64_t from, int64_t length) { candidates.added(pass(candidates, from, length)); });
    if (found.count > wanted.k) keep_top(found, wanted.k, wanted.order);
    return found.count == wanted.k || bound == wanted.lowest;
}

}  // namespace

void select(const Passes &passes, const float *x, int64_t n, Range range, Found &found) {
    found.count = 0;
    in_blocks({{0, n}}, [&](int64_t start, int64_t length) {
        found.reserve(found.count + length);
        found.count += passes.select(x + start, length, static_cast<int32_t>(start), range, found.end());
    });
}

void top(const Passes &passes, const float *x, const std::vector<Span> &spans, Top wanted, Found &found) {
    found.count = 0;
    if (wanted.k == 0) return;
    const auto pass = [&](Candidates &candidates, int64_t from, int64_t length) -> int64_t {
        if (candidates.full()) return 0;
        const auto base = static_cast<int32_t>(from);
        const Sink sink = candidates.room(length);
        if (wanted.order == Order::number) return passes.select_number(x + from, length, base, candidates.bound(), sink);
        return passes.select(x + from, length, base, candidates.range(), sink);
    };
    if (wanted.guessed && collect(spans, wanted, std::max(wanted.guess, wanted.lowest), found, pass)) return;
    const int32_t bound = sampled_bound(spans, wanted, [x](int64_t i) { return x[i]; });
    if (!collect(spans, wanted, bound, found, pass)) collect(spans, wanted, wanted.lowest, found, pass);
}

uint32_t add_top(const Passes &passes, const float *residual, Gradient grad, float *out, int64_t n, Span skip, Top wanted,
                 Found &found) {
    const std::vector<Span> whole{{0, skip.start}, skip, {skip.stop, n}}, searched{whole[0], whole[2]};
    if (wanted.k == 0) {
        found.count = 0;
        return passes.add(residual, grad.data, grad.type, out, n);
    }
    const auto sum = [&](int64_t i) {
        float one;
        passes.add(residual + i, at(grad, i), grad.type, &one, 1);
        return one;
    };
    const int32_t bound = wanted.guessed ? std::max(wanted.guess, wanted.lowest) : sampled_bound(searched, wanted, sum);
    uint32_t greatest = 0;
    const bool enough = collect(whole, wanted, bound, found, [&](Candidates &candidates, int64_t from, int64_t length) {
        const Sink sink = candidates.room(length);
        const bool skipped = from >= skip.start && from < skip.stop;
        return passes.add_select(residual + from, at(grad, from), grad.type, out + from, length, static_cast<int32_t>(from),
                                 skipped ? kNone : candidates.range(), sink, &greatest);
    });
    if (!enough) {
        wanted.guessed = false;
        top(passes, out, searched, wanted, found);
    }
    return greatest;
}

}  // namespace sparsync
