// Whole vectors are worked on in blocks, so that the buffer for a selection grows by what a block can hold at most.
#pragma once

#include <algorithm>
#include <vector>

#include "core.hpp"

namespace sparsync {

constexpr int64_t kBlock = 8192;

// Runs work(start, length) for each block of `spans`, in order.
template <class Work>
void in_blocks(const std::vector<Span> &spans, Work work) {
    for (const Span &span : spans)
        for (int64_t start = span.start; start < span.stop; start += kBlock)
            work(start, std::min(kBlock, span.stop - start));
}

inline const void *at(Gradient grad, int64_t position) {
    return static_cast<const char *>(grad.data) + position * (grad.type == Type::float32 ? 4 : 2);
}

}  // namespace sparsync
