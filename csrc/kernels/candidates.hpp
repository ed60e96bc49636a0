// Candidates for the k largest while a vector is passed over, and the bound that the rest of it has to reach.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "core.hpp"

namespace sparsync {

constexpr int64_t kSpare = 65536;   // candidates beyond k before any are dropped, at least
constexpr int64_t kSample = 4096;   // elements looked at to find a bound
constexpr double kDeviations = 4.0;  // by which the count in a sample is taken to be off

// What may be among the k, and the bound that the rest of the vector has to reach.
class Candidates {
  public:
    Candidates(Found &found, Top wanted, int32_t bound) : found_(found), wanted_(wanted), bound_(bound) {}

    bool full() const { return full_; }
    Range range() const { return full_ ? kNone : Range{static_cast<uint32_t>(bound_), kMagnitude}; }
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
        const uint32_t order = keep_top(found_, wanted_.k);
        full_ = order == kInfinity;
        bound_ = static_cast<int32_t>(order + 1);
    }

    Found &found_;
    Top wanted_;
    int32_t bound_;
    bool full_ = false;
};

// Whether enough was found above `bound`, or all there is; keeps the k largest.
inline bool keep_wanted(Found &found, Top wanted, int32_t bound) {
    if (found.count > wanted.k) keep_top(found, wanted.k);
    return found.count == wanted.k || bound == wanted.lowest;
}

inline int64_t length_of(const std::vector<Span> &spans) {
    int64_t total = 0;
    for (const Span &span : spans) total += span.stop - span.start;
    return total;
}

inline int32_t order_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<int32_t>(std::min(bits & kMagnitude, kInfinity));
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
        for (next += span.start; next < span.stop; next += stride) sample.push_back(order_of(value_at(next)));
        next -= span.stop;
    }
    const double expected = static_cast<double>(sample.size()) * static_cast<double>(wanted.k) / static_cast<double>(n);
    const auto place = static_cast<int64_t>(expected + kDeviations * std::sqrt(expected) + 1);
    if (place >= static_cast<int64_t>(sample.size())) return wanted.lowest;
    std::nth_element(sample.begin(), sample.begin() + place, sample.end(), std::greater<int32_t>());
    return std::max(wanted.lowest, sample[static_cast<size_t>(place)]);
}

}  // namespace sparsync
