// Several sparse vectors in one call, as Python sees it: what small buckets would otherwise spend on calls. Each function does what a
// loop over others does, in sparsync/wire.py or sparsync/kernels/operations.py, with the same results. For whatever it does not take, also for
// packets and positions that are to be refused, it returns NotImplemented before it writes anything that is seen, and the loop says why.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "bindings.hpp"
#include "kernels/level.hpp"
#include "kernels/packets.hpp"
#include "kernels/sparse.hpp"

namespace nb = nanobind;
using namespace sparsync;

namespace {

constexpr int64_t kMostElements = INT32_MAX;

// A sparsync.core.Sparse of int32 and float32; `taken` is false for any other.
struct Part {
    nb::object index, value;
    Tensor at, content;
    int64_t length;

    explicit Part(nb::handle part)
        : index(part.attr("index")), value(part.attr("value")), at(read(index)), content(read(value)),
          length(nb::cast<int64_t>(part.attr("length"))) {}

    bool taken() const {
        return at.is(Element::int32) && content.is(Element::float32) && at.length == content.length && at.length <= length &&
               length <= kMostElements;
    }
};

std::vector<Part> parts_of(nb::handle sequence) {
    std::vector<Part> parts;
    for (const nb::handle each : nb::borrow<nb::sequence>(sequence)) parts.emplace_back(each);
    return parts;
}

bool has_floats(const std::vector<Part> &parts) {
    return std::all_of(parts.begin(), parts.end(), [](const Part &part) { return part.content.is(Element::float32); });
}

bool all_taken(const std::vector<Part> &parts) {
    return std::all_of(parts.begin(), parts.end(), [](const Part &part) { return part.taken(); });
}

// The rows that places count, one region for each part; none for None.
struct Regions {
    std::vector<Read> regions;
    bool given;

    explicit Regions(nb::handle sequence) : given(!sequence.is_none()) {
        if (!given) return;
        for (const nb::handle each : nb::borrow<nb::sequence>(sequence)) regions.emplace_back(each);
    }

    bool taken(size_t count) const {
        return !given || (regions.size() == count && std::all_of(regions.begin(), regions.end(), [](const Read &region) {
                              return region.taken() && region.rows.row >= 1 && region.rows.length >= 0 &&
                                     region.rows.length <= kMostElements && region.rows.row <= kMostElements &&
                                     region.rows.count() <= region.starts.length;
                          }));
    }
};

nb::object encode_packets(nb::handle sequence, int64_t bits, int64_t divisor, nb::handle rows, int64_t n) {
    const std::vector<Part> parts = parts_of(sequence);
    const Regions places(rows);
    if (!are_value_bits(bits) || divisor < 1 || !all_taken(parts) || !places.taken(parts.size())) return not_taken();
    const Codecs &codecs = *level().codecs;
    std::vector<PacketForm> forms;
    std::vector<Made> packets, errors, positions;
    int64_t longest = 0;
    for (const Part &part : parts) {
        const int64_t k = part.at.length;
        forms.push_back(packet_form(codecs, k, part.length, static_cast<int>(bits)));
        packets.push_back(make(forms.back().nbytes, Element::uint8));
        errors.push_back(make(k, Element::float32));
        if (places.given) positions.push_back(make(k, Element::int32));
        longest = std::max(longest, k);
    }
    const bool fine = unlocked([&] {
        std::vector<float> shares(divisor == 1 ? 0 : static_cast<size_t>(longest)), received(static_cast<size_t>(longest));
        for (size_t i = 0; i < parts.size(); ++i) {
            const Part &part = parts[i];
            const int64_t k = part.at.length;
            const float *value = part.content.as<float>(), *sent = value;
            if (divisor != 1) {
                std::transform(value, value + k, shares.data(), [&](float each) { return each / static_cast<float>(divisor); });
                sent = shares.data();
            }
            if (!encode_packet(codecs, forms[i], part.at.as<int32_t>(), sent, packets[i].as<uint8_t>())) return false;
            decode_packet_values(codecs, forms[i], packets[i].as<uint8_t>(), received.data());
            lacking(value, received.data(), k, divisor, errors[i].as<float>());
            if (places.given && !locate(places.regions[i].rows, part.at.as<int32_t>(), k, positions[i].as<int32_t>())) return false;
        }
        return true;
    });
    if (!fine) return not_taken();
    nb::list sent, dropped;
    for (size_t i = 0; i < parts.size(); ++i) {
        sent.append(packets[i].object);
        dropped.append(places.given ? sparse(positions[i].object, errors[i].object, n)
                                    : sparse(parts[i].index, errors[i].object, parts[i].length));
    }
    return nb::make_tuple(sent, dropped);
}

// Packets that others made, and what they are to hold; `taken` is false where they cannot hold it.
struct Arrived {
    std::vector<Tensor> packets;
    std::vector<nb::object> held;  // whoever drops the sequence meanwhile
    Regions places;
    std::vector<PacketForm> forms;
    bool taken = false;

    Arrived(nb::handle sequence, const std::vector<int64_t> &counts, const std::vector<int64_t> &lengths, int64_t bits, nb::handle rows)
        : places(rows) {
        for (const nb::handle each : nb::borrow<nb::sequence>(sequence)) {
            packets.push_back(read(each));
            held.push_back(nb::borrow(each));
            if (!packets.back().is(Element::uint8)) return;
        }
        const size_t count = packets.size();
        if (!are_value_bits(bits) || counts.size() != count || lengths.size() != count || !places.taken(count)) return;
        for (size_t i = 0; i < count; ++i) {
            if (counts[i] < 0 || counts[i] > lengths[i] || lengths[i] > kMostElements) return;
            forms.push_back(packet_form(*level().codecs, counts[i], lengths[i], static_cast<int>(bits)));
            if (packets[i].length != forms.back().nbytes) return;
        }
        taken = true;
    }

    // False for bytes that are no packet. Needs no GIL.
    bool decode(size_t i, int32_t *index, float *value) const {
        if (!decode_packet(*level().codecs, forms[i], packets[i].as<uint8_t>(), packets[i].length, index, value)) return false;
        return !places.given || locate(places.regions[i].rows, index, forms[i].k, index);
    }
};

nb::object decode_packets(nb::handle sequence, const std::vector<int64_t> &counts, const std::vector<int64_t> &lengths, int64_t bits,
                          nb::handle rows, int64_t n) {
    const Arrived arrived(sequence, counts, lengths, bits, rows);
    if (!arrived.taken) return not_taken();
    std::vector<Made> index, value;
    for (const int64_t k : counts) {
        index.push_back(make(k, Element::int32));
        value.push_back(make(k, Element::float32));
    }
    const bool fine = unlocked([&] {
        for (size_t i = 0; i < counts.size(); ++i)
            if (!arrived.decode(i, index[i].as<int32_t>(), value[i].as<float>())) return false;
        return true;
    });
    if (!fine) return not_taken();
    nb::list found;
    for (size_t i = 0; i < counts.size(); ++i)
        found.append(sparse(index[i].object, value[i].object, arrived.places.given ? n : lengths[i]));
    return std::move(found);
}

nb::object add_packets_(nb::handle out, nb::handle sequence, const std::vector<int64_t> &counts, const std::vector<int64_t> &lengths,
                        int64_t bits, nb::handle rows) {
    const Tensor x = read(out);
    const Arrived arrived(sequence, counts, lengths, bits, rows);
    if (!x.is(Element::float32) || !arrived.taken) return not_taken();
    const bool fine = unlocked([&] {
        std::vector<std::vector<int32_t>> index;
        std::vector<std::vector<float>> value;
        for (size_t i = 0; i < counts.size(); ++i) {
            index.emplace_back(static_cast<size_t>(counts[i]));
            value.emplace_back(static_cast<size_t>(counts[i]));
            if (!arrived.decode(i, index[i].data(), value[i].data())) return false;
            for (const int32_t position : index[i])
                if (position < 0 || position >= x.length) return false;
        }
        for (size_t i = 0; i < counts.size(); ++i) scatter_add(x.as<float>(), x.length, index[i].data(), value[i].data(), counts[i]);
        return true;
    });
    return fine ? nb::none() : not_taken();
}

nb::object finite_each(nb::handle sequence, int64_t times) {
    const std::vector<Part> parts = parts_of(sequence);
    if (!has_floats(parts)) return not_taken();
    return nb::bool_(unlocked([&] {
        return std::all_of(parts.begin(), parts.end(), [&](const Part &part) {
            return finite_times(part.content.as<float>(), part.content.length, static_cast<float>(times));
        });
    }));
}

}  // namespace

void bind_packets(nb::module_ &m) {
    m.def("encode_packets", encode_packets, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg());
    m.def("decode_packets", decode_packets, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg());
    m.def("add_packets_", add_packets_, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
    m.def("finite_each", finite_each);
}
