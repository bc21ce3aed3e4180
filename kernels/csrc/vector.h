// Vectors of float32 as wide as the instruction set of this translation unit, and what the kernels
// do with them. Sums of vectors add lanes in one fixed order.
//
// The instructions are in one header per machine, which define the same names; what is here, and the
// kernels, are made of these names.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__aarch64__)
#include "vector_neon.h"
#else
#include "vector_x86.h"
#endif

// Before a loop of few rounds: arrays of sums stay in registers only if all of its rounds are written
// out, which compilers do not always do by themselves.
#if defined(__clang__)
#define WRITTEN_OUT _Pragma("clang loop unroll(full)")
#else
#define WRITTEN_OUT _Pragma("GCC unroll 16")
#endif

// A function that must not be called: what it works on stays in registers.
#define INLINED __attribute__((always_inline))

namespace {

// Asks for the line of a cache that holds this address; any address will do.
inline void prefetch(const void* p) { __builtin_prefetch(p); }

// The same for the L2 cache, where more lines can be on their way from memory at once.
inline void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

#if !defined(__AVX512F__)

// Which of 16 whole numbers are not above a limit, a bit each.
inline uint16_t up_to(const uint32_t* keys, uint32_t limit) {
    uint8_t bytes[16];
    for (int i = 0; i < 16; i++) bytes[i] = keys[i] <= limit;
    uint64_t low, high;
    std::memcpy(&low, bytes, 8);
    std::memcpy(&high, bytes + 8, 8);
    return static_cast<uint16_t>((low * 0x0102040810204080u >> 56) |
                                 (high * 0x0102040810204080u >> 56 << 8));
}

// The keys between two others, both included, in their order; how many there are. `out` may be the
// keys; it has room for 16 more than that.
inline int64_t store_between(const uint32_t* keys, int64_t count, uint32_t low, uint32_t high,
                             uint32_t* out) {
    int64_t found = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t key = keys[i];
        out[found] = key;
        found += key - low <= high - low;
    }
    return found;
}

// The places of the bits that are set, after `base`; how many there are.
inline int store_places(uint16_t bits, int32_t base, int32_t* out) {
    int count = 0;
    for (uint32_t rest = bits; rest; rest &= rest - 1) out[count++] = base + __builtin_ctz(rest);
    return count;
}

#endif

// e^x within 2 units in the last place; 0 below -87.3, and as e^88.3 above 88.3.
inline Vec exp(Vec x) {
    Vec bounded = min(set1(88.3f), max(set1(-87.3f), x));  // in this order NaN stays NaN
    Vec n = round(bounded * set1(1.44269504088896341f));
    Vec r = fma(n, set1(-0.693359375f), bounded);
    r = fma(n, set1(2.12194440e-4f), r);
    Vec p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    Vec result = fma(p, r * r, r + set1(1.0f)) * power_of_two(n);
    return zero_below(result, x, -87.3f);
}

// tanh(x) within 2e-7.
inline Vec tanh(Vec x) {
    Vec bounded = min(set1(20.0f), max(set1(-20.0f), x));
    return set1(1.0f) - set1(2.0f) / (exp(bounded + bounded) + set1(1.0f));
}

}  // namespace
