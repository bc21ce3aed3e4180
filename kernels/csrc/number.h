// Numbers that are not float32, one at a time.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

using bf16 = uint16_t;  // the upper half of a float32

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
    uint32_t bits = static_cast<uint32_t>(x) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

}  // namespace
