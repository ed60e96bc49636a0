#include "level.hpp"

#include <atomic>

namespace sparsync {

namespace {

std::vector<Level> available() {
    const Level all[] = {{"avx512", passes_avx512(), codecs_avx512()},
                         {"avx2", passes_avx2(), codecs_avx2()},
                         {"scalar", passes_scalar(), codecs_scalar()}};
    std::vector<Level> found;
    for (const Level &each : all)
        if (each.passes && each.codecs) found.push_back(each);
    return found;
}

std::atomic<const Level *> &current() {
    static std::atomic<const Level *> level{&levels().front()};
    return level;
}

}  // namespace

const std::vector<Level> &levels() {
    static const std::vector<Level> found = available();
    return found;
}

const Level &level() { return *current().load(std::memory_order_relaxed); }

bool set_level(const std::string &name) {
    for (const Level &each : levels())
        if (name == each.name) {
            current().store(&each, std::memory_order_relaxed);
            return true;
        }
    return false;
}

}  // namespace sparsync
