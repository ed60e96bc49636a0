// Selecting from a whole vector, by a range of magnitudes or the k of highest order.
//
// Exact top-k takes one pass. Candidates that reach a bound are collected; whenever there are far more than k, all but the k largest are
// dropped and the bound rises to the smallest of them. So any bound that k elements reach gives the right answer, in linear time; a
// good one, from the last step or from a sample, gives it at the speed of the pass. Where too few reach it, a lower one is taken.
#include <algorithm>

#include "blocks.hpp"
#include "candidates.hpp"

namespace sparsync {

namespace {

// Runs pass(candidates, start, length) over `spans`; whether enough was found.
template <class Pass>
bool collect(const std::vector<Span> &spans, Top wanted, int32_t bound, Found &found, Pass pass) {
    found.count = 0;
    Candidates candidates(found, wanted, bound);
    in_blocks(spans, [&](int64_t from, int64_t length) { candidates.added(pass(candidates, from, length)); });
    return keep_wanted(found, wanted, bound);
}

}  // namespace

void select(const Passes &passes, const float *x, int64_t n, Range range, Found &found) {
    found.count = 0;
    in_blocks({{0, n}}, [&](int64_t start, int64_t length) {
        found.reserve(found.count + length);
        found.count += passes.select(x + start, length, static_cast<int32_t>(start), range, found.end());
    });
}

uint32_t add_select(const Passes &passes, const float *residual, Gradient grad, float *out, int64_t n, Span span, Range range,
                    Found &found) {
    found.count = 0;
    uint32_t greatest = 0;
    in_blocks({{0, span.start}, span, {span.stop, n}}, [&](int64_t from, int64_t length) {
        if (from < span.start || from >= span.stop) {
            greatest = std::max(greatest, passes.add(residual + from, at(grad, from), grad.type, out + from, length));
            return;
        }
        found.reserve(found.count + length);
        found.count += passes.add_select(residual + from, at(grad, from), grad.type, out + from, length,
                                         static_cast<int32_t>(from), range, found.end(), &greatest);
    });
    return greatest;
}

void top(const Passes &passes, const float *x, const std::vector<Span> &spans, Top wanted, Found &found) {
    found.count = 0;
    if (wanted.k == 0) return;
    const auto pass = [&](Candidates &candidates, int64_t from, int64_t length) -> int64_t {
        if (candidates.full()) return 0;
        const auto base = static_cast<int32_t>(from);
        const Sink sink = candidates.room(length);
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
