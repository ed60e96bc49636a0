// The codecs with the loops over values in AVX-512, by the compiler; those over streams of bits have no use for 16 numbers at once.
#include "codecs.hpp"

#ifdef __AVX512F__
#include "positions.hpp"
#include "shares.hpp"
#include "values.hpp"
#endif

namespace sparsync {

const Codecs *codecs_avx512() {
#ifdef __AVX512F__
    static constexpr Codecs codecs{encoded_nbytes, encode,       decode,        values_nbytes,
                                   encode_values,  encode_share, reduce_shares, decode_over};
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && codecs_avx2())
        return &codecs;
#endif
    return nullptr;
}

}  // namespace sparsync
