#include <cstdlib>
#include <new>
#include <utility>

#include "core.hpp"

namespace sparsync {

namespace {

constexpr int64_t kKept = int64_t{1} << 23;  // elements a buffer may hold on to between calls: 64 MiB

template <class Element>
void resize(Element *&array, int64_t elements) {
    void *larger = std::realloc(array, static_cast<size_t>(elements) * sizeof(Element));
    if (!larger) throw std::bad_alloc();
    array = static_cast<Element *>(larger);
}

}  // namespace

Found::~Found() {
    std::free(index_);
    std::free(value_);
}

void Found::reserve(int64_t elements) {
    const int64_t needed = elements + kSlack;
    if (needed <= capacity_) return;
    const int64_t more = needed > capacity_ + capacity_ / 2 ? needed : capacity_ + capacity_ / 2;
    resize(index_, more);
    resize(value_, more);
    capacity_ = more;
}

void Found::release() {
    count = 0;
    if (capacity_ <= kKept) return;
    std::free(std::exchange(index_, nullptr));
    std::free(std::exchange(value_, nullptr));
    capacity_ = 0;
}

}  // namespace sparsync
