#include "packets.hpp"

#include <cmath>
#include <cstring>
#include <initializer_list>

namespace sparsync {

namespace {

int64_t all_values_nbytes(const Codecs &codecs, int64_t k, int bits) {
    return bits == 32 ? k * static_cast<int64_t>(sizeof(float)) : codecs.values_nbytes(k, bits);
}

// memcpy takes no null pointers, which empty tensors have.
void copy(void *to, const void *from, int64_t nbytes) {
    if (nbytes) std::memcpy(to, from, static_cast<size_t>(nbytes));
}

}  // namespace

PacketForm packet_form(const Codecs &codecs, int64_t k, int64_t length, int bits) {
    PacketForm form{k, length, bits, Positions::packed, 0, 0};
    if (k < length) {
        form.head = codecs.nbytes(Positions::packed, k, length);
        for (const Positions codec : {Positions::bitmap, Positions::elias_fano}) {
            const int64_t nbytes = codecs.nbytes(codec, k, length);
            if (nbytes < form.head) form.codec = codec, form.head = nbytes;
        }
    }
    form.nbytes = form.head + all_values_nbytes(codecs, k, bits);
    return form;
}

bool encode_packet(const Codecs &codecs, const PacketForm &form, const int32_t *index, const float *value, uint8_t *out) {
    if (form.k == form.length) {
        for (int64_t i = 0; i < form.k; ++i)
            if (index[i] != i) return false;
    } else if (codecs.encode(form.codec, index, form.k, form.length, out) != fine) {
        return false;
    }
    out += form.head;
    if (form.bits == 32)
        copy(out, value, form.k * static_cast<int64_t>(sizeof(float)));
    else
        codecs.encode_values(value, form.k, form.bits, out);
    return true;
}

bool decode_packet(const Codecs &codecs, const PacketForm &form, const uint8_t *packet, int64_t nbytes, int32_t *index, float *value) {
    if (nbytes != form.nbytes) return false;
    if (form.k == form.length) {
        for (int64_t i = 0; i < form.k; ++i) index[i] = static_cast<int32_t>(i);
    } else if (codecs.decode(form.codec, packet, form.head, form.k, form.length, index) != fine) {
        return false;
    }
    decode_packet_values(codecs, form, packet, value);
    return true;
}

void decode_packet_values(const Codecs &codecs, const PacketForm &form, const uint8_t *packet, float *value) {
    packet += form.head;
    if (form.bits == 32)
        copy(value, packet, form.k * static_cast<int64_t>(sizeof(float)));
    else
        codecs.decode_over(packet, 0, form.k, form.k, form.bits, value, nullptr);
}

void lacking(const float *value, const float *received, int64_t k, int64_t times, float *error) {
    const auto factor = static_cast<float>(times);
    bool finite = true;
    for (int64_t i = 0; i < k; ++i) {
        error[i] = value[i] - factor * received[i];
        finite &= std::isfinite(error[i]);
    }
    if (finite || times == 1) return;
    for (int64_t i = 0; i < k; ++i)
        error[i] = static_cast<float>(static_cast<double>(value[i]) - static_cast<double>(times) * static_cast<double>(received[i]));
}

bool finite_times(const float *value, int64_t k, float times) {
    bool finite = true;
    for (int64_t i = 0; i < k; ++i) finite &= std::isfinite(value[i]) & std::isfinite(value[i] * times);
    return finite;
}

}  // namespace sparsync
