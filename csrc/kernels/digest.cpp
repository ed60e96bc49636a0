#include "digest.hpp"

#include <cstring>

namespace sparsync {

namespace {

constexpr int64_t kColumns = 509;  // a prime, so that rows of a weight that change places land in other columns

// Another number for another word at the same place, by splitmix64.
uint64_t mixed(uint64_t value, int64_t place) {
    uint64_t z = value + static_cast<uint64_t>(place + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

template <class Word>
uint64_t word(const char *bytes, int64_t i) {
    Word value;
    std::memcpy(&value, bytes + i * static_cast<int64_t>(sizeof(Word)), sizeof(Word));
    return static_cast<uint64_t>(static_cast<int64_t>(value));
}

template <class Word>
uint64_t digest_of(const char *bytes, int64_t count) {
    // The number of rows is odd: with an even one the highest bits of all rows could change and no sum would.
    const int64_t rest = count < 2 * kColumns ? count : kColumns + count % (2 * kColumns);
    uint64_t found = 0;
    for (int64_t i = 0; i < rest; ++i) found += mixed(word<Word>(bytes, i), i);
    if (rest == count) return found;
    uint64_t sums[kColumns];
    for (int64_t column = 0; column < kColumns; ++column) sums[column] = word<Word>(bytes, rest + column);
    for (int64_t row = rest + kColumns; row < count; row += 2 * kColumns) {
        const char *one = bytes + row * static_cast<int64_t>(sizeof(Word)), *other = one + kColumns * sizeof(Word);
        for (int64_t column = 0; column < kColumns; ++column)
            sums[column] += word<Word>(one, column) + word<Word>(other, column);
    }
    for (int64_t column = 0; column < kColumns; ++column) found += mixed(sums[column], rest + column);
    return found;
}

}  // namespace

int64_t digest(const void *content, int64_t nbytes) {
    const char *bytes = static_cast<const char *>(content);
    const uint64_t found = nbytes % 8 == 0   ? digest_of<int64_t>(bytes, nbytes / 8)
                           : nbytes % 4 == 0 ? digest_of<int32_t>(bytes, nbytes / 4)
                           : nbytes % 2 == 0 ? digest_of<int16_t>(bytes, nbytes / 2)
                                             : digest_of<uint8_t>(bytes, nbytes);
    return static_cast<int64_t>(found);
}

}  // namespace sparsync
