// The codecs for any machine.
#include "positions.hpp"
#include "shares.hpp"
#include "values.hpp"

namespace sparsync {

const Codecs *codecs_scalar() {
    static constexpr Codecs codecs{encoded_nbytes, encode,       decode,        values_nbytes,
                                   encode_values,  encode_share, reduce_shares, decode_over};
    return &codecs;
}

}  // namespace sparsync
