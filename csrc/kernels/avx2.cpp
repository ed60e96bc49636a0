// The passes in AVX2: selected lanes are moved together by a permutation out of a table.
#include "kernels.hpp"

#ifdef __AVX2__
#include <immintrin.h>

namespace sparsync {
namespace {

// For each mask of 8 lanes, its lanes first, in order.
struct Permutations {
    alignas(64) uint64_t lanes[256];
    constexpr Permutations() : lanes() {
        for (int mask = 0; mask < 256; ++mask) {
            int place = 0;
            for (uint64_t lane = 0; lane < 8; ++lane)
                if (mask >> lane & 1) lanes[mask] |= lane << 8 * place++;
        }
    }
};
constexpr Permutations kPermutations;

struct Vec {
    using F = __m256;
    using I = __m256i;
    using M = __m256i;
    static constexpr int kWidth = 8, kGroup = 4;

    static F load(const float *p) { return _mm256_loadu_ps(p); }
    static F load_bfloat16(const uint16_t *p) {
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    }
    static F load_float16(const uint16_t *p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    }
    static void store(float *p, F value) { _mm256_storeu_ps(p, value); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F subtract(F a, F b) { return _mm256_sub_ps(a, b); }
    static F multiply(F a, F b) { return _mm256_mul_ps(a, b); }
    static F divide(F a, F b) { return _mm256_div_ps(a, b); }
    static F root(F a) { return _mm256_sqrt_ps(a); }
    static F all(float value) { return _mm256_set1_ps(value); }
    static I set(uint32_t value) { return _mm256_set1_epi32(static_cast<int>(value)); }
    static I magnitude(F value) { return _mm256_and_si256(_mm256_castps_si256(value), set(kMagnitude)); }
    static I maximum(I a, I b) { return _mm256_max_epu32(a, b); }
    static uint32_t reduce(I value) {
        uint32_t lanes[8], most = 0;
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(lanes), value);
        for (uint32_t lane : lanes) most = lane > most ? lane : most;
        return most;
    }
    static M between(I value, I low, I high) {
        return _mm256_andnot_si256(_mm256_cmpgt_epi32(low, value), _mm256_cmpeq_epi32(_mm256_min_epu32(value, high), value));
    }
    static M either(M a, M b) { return _mm256_or_si256(a, b); }
    static bool any(M mask) { return !_mm256_testz_si256(mask, mask); }
    static int64_t compress(M mask, int32_t position, F value, int32_t *index, float *out) {
        const int chosen = _mm256_movemask_ps(_mm256_castsi256_ps(mask));
        const I lanes = _mm256_cvtepu8_epi32(
            _mm_loadl_epi64(reinterpret_cast<const __m128i *>(&kPermutations.lanes[chosen])));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(index), _mm256_add_epi32(lanes, _mm256_set1_epi32(position)));
        _mm256_storeu_ps(out, _mm256_permutevar8x32_ps(value, lanes));
        return __builtin_popcount(static_cast<unsigned>(chosen));
    }
};

}  // namespace
}  // namespace sparsync

#include "passes.hpp"
#endif

namespace sparsync {

const Passes *passes_avx2() {
#ifdef __AVX2__
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2") &&
        __builtin_cpu_supports("popcnt"))
        return &table;
#endif
    return nullptr;
}

}  // namespace sparsync
