// One pass of 12 bytes an element. Of long vectors the stores go past the caches, which would only fetch the lines that are about to be
// overwritten.
#include "move.hpp"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace sparsync {

constexpr int64_t kFew = int64_t{1} << 20;  // 4 MiB twice: what a core's caches may hold, and past which it is slower to store
constexpr int64_t kChunk = 2048;

static void move_few(float *to, float *from, int64_t n) {
    const auto nbytes = static_cast<size_t>(n) * sizeof(float);
    if (n == 0) return;
    std::memcpy(to, from, nbytes);
    std::memset(from, 0, nbytes);
}

static void move_past_caches(float *to, float *from, int64_t n) {
    int64_t i = 0;
#if defined(__SSE2__)
    const auto aligned = [](const float *p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
    for (; i < n && !aligned(to + i); ++i) {
        to[i] = from[i];
        from[i] = 0.0f;
    }
    const bool same_phase = aligned(from + i);
    const __m128 zero = _mm_setzero_ps();
    for (; i + 16 <= n; i += 16) {  // a cache line
        const __m128 a = _mm_loadu_ps(from + i), b = _mm_loadu_ps(from + i + 4);
        const __m128 c = _mm_loadu_ps(from + i + 8), d = _mm_loadu_ps(from + i + 12);
        _mm_stream_ps(to + i, a);
        _mm_stream_ps(to + i + 4, b);
        _mm_stream_ps(to + i + 8, c);
        _mm_stream_ps(to + i + 12, d);
        if (same_phase) {
            for (int j = 0; j < 16; j += 4) _mm_store_ps(from + i + j, zero);
        } else {
            std::memset(from + i, 0, 16 * sizeof(float));
        }
    }
#endif
    for (; i < n; ++i) {
        to[i] = from[i];
        from[i] = 0.0f;
    }
}

static void fetch(const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(x + i, 1);
}

// Puts each part's elements below `stop` into x, and drops them from the part.
static void put_below(float *x, int64_t stop, std::vector<SparseView> &parts) {
    for (SparseView &part : parts) {
        int64_t i = 0;
        for (; i < part.count && part.index[i] < stop; ++i) x[part.index[i]] = part.value[i];
        part = {part.index + i, part.value + i, part.count - i};
    }
}

void move_put(float *to, float *from, int64_t n, const std::vector<SparseView> &kept, const std::vector<SparseView> &written) {
    const auto move_chunk = n <= kFew ? move_few : move_past_caches;
    std::vector<SparseView> kept_rest = kept, written_rest = written;
    for (int64_t i = 0; i < n; i += kChunk) {
        const int64_t count = std::min(kChunk, n - i);
        put_below(from, i + count, kept_rest);  // before it moves: where it goes to may not be in a cache
        if (!kept.empty()) fetch(from + i + count, std::min(kChunk, n - i - count));  // for the next chunk's
        move_chunk(to + i, from + i, count);
        put_below(from, i + count, written_rest);
    }
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

}  // namespace sparsync
