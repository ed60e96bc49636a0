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
constexpr int64_t kChunk = 4096;

static void move_few(float *to, float *from, int64_t n) {
    for (int64_t i = 0; i < n; i += kChunk) {
        const auto nbytes = static_cast<size_t>(std::min(kChunk, n - i)) * sizeof(float);
        std::memcpy(to + i, from + i, nbytes);
        std::memset(from + i, 0, nbytes);
    }
}

void move(float *to, float *from, int64_t n) {
    if (n <= kFew) return move_few(to, from, n);
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
    _mm_sfence();
#endif
    for (; i < n; ++i) {
        to[i] = from[i];
        from[i] = 0.0f;
    }
}

}  // namespace sparsync
