// Vectors in NEON, which every aarch64 CPU has; WIDTH 4, since the kernels fill its 32 registers.
#pragma once

#include <arm_neon.h>

#include "number.h"

namespace {

struct Vec {
    static constexpr int WIDTH = 4;
    float32x4_t v;
};

inline Vec set1(float x) { return {vdupq_n_f32(x)}; }
inline Vec load(const float* p) { return {vld1q_f32(p)}; }
inline void store(float* p, Vec a) { vst1q_f32(p, a.v); }
inline Vec operator+(Vec a, Vec b) { return {vaddq_f32(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {vsubq_f32(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {vmulq_f32(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {vdivq_f32(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
inline Vec max(Vec a, Vec b) { return {vmaxq_f32(a.v, b.v)}; }  // NaN where either is
inline Vec min(Vec a, Vec b) { return {vminq_f32(a.v, b.v)}; }

// The first n (< WIDTH) numbers; the other lanes are `rest`.
inline Vec load_first(const float* p, int n, float rest) {
    float all[4] = {rest, rest, rest, rest};
    std::memcpy(all, p, static_cast<size_t>(n) * 4);
    return load(all);
}

inline void store_first(float* p, int n, Vec a) {
    float all[4];
    store(all, a);
    std::memcpy(p, all, static_cast<size_t>(n) * 4);
}

inline Vec load(const bf16* p) { return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16))}; }

inline Vec load_first(const bf16* p, int n, float rest) {
    float all[4];
    for (int i = 0; i < 4; i++) all[i] = i < n ? to_float(p[i]) : rest;
    return load(all);
}

// Rounded to nearest, ties to even; NaN stays NaN.
inline void store(bf16* p, Vec a) {
    uint32x4_t bits = vreinterpretq_u32_f32(a.v);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    rounded = vbslq_u32(vceqq_f32(a.v, a.v), rounded, vdupq_n_u32(0x7fc00000));
    vst1_u16(p, vshrn_n_u32(rounded, 16));
}

inline void store_first(bf16* p, int n, Vec a) {
    bf16 all[4];
    store(all, a);
    std::memcpy(p, all, static_cast<size_t>(n) * 2);
}

// 2^n for whole n between -126 and 127.
inline Vec power_of_two(Vec n) {
    int32x4_t bits = vaddq_s32(vcvtnq_s32_f32(n.v), vdupq_n_s32(127));
    return {vreinterpretq_f32_s32(vshlq_n_s32(bits, 23))};
}

inline Vec round(Vec a) { return {vrndnq_f32(a.v)}; }

// `a` where x >= limit or x is NaN, else 0.
inline Vec zero_below(Vec a, Vec x, float limit) {
    uint32x4_t below = vcltq_f32(x.v, vdupq_n_f32(limit));
    return {vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(a.v), below))};
}

inline uint32x4_t load_bits(const void* p) {
    return vreinterpretq_u32_u8(vld1q_u8(static_cast<const uint8_t*>(p)));
}

// The numbers of WIDTH pairs of bfloat16: those at even places, and those at odd ones.
inline Vec even_of(const void* p) { return {vreinterpretq_f32_u32(vshlq_n_u32(load_bits(p), 16))}; }

inline Vec odd_of(const void* p) {
    return {vreinterpretq_f32_u32(vandq_u32(load_bits(p), vdupq_n_u32(0xffff0000)))};
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

#define HAS_PAIRS

// Two factors in bfloat16, for pairs of numbers.
struct Pair {
    bfloat16x8_t v;
};

inline Pair pair_of(const bf16* x) {
    uint32_t bits;
    std::memcpy(&bits, x, 4);
    return {vreinterpretq_bf16_u32(vdupq_n_u32(bits))};
}

inline Vec fma(Pair factors, const void* pairs, Vec sums) {
    bfloat16x8_t numbers = vreinterpretq_bf16_u32(load_bits(pairs));
    return {vbfdotq_f32(sums.v, numbers, factors.v)};
}

#endif

inline void transpose4(const uint32_t* const* rows, int column, uint32_t* out, int stride) {
    uint32x4_t a[4], b[4];
    for (int i = 0; i < 4; i++) a[i] = vld1q_u32(rows[i] + column);
    for (int i = 0; i < 4; i += 2) {
        b[i] = vtrn1q_u32(a[i], a[i + 1]);
        b[i + 1] = vtrn2q_u32(a[i], a[i + 1]);
    }
    // b[i + c]: columns c and c + 2 of rows i and i + 1
    for (int c = 0; c < 2; c++) {
        uint64x2_t upper = vreinterpretq_u64_u32(b[c]), lower = vreinterpretq_u64_u32(b[c + 2]);
        vst1q_u32(out + c * stride, vreinterpretq_u32_u64(vtrn1q_u64(upper, lower)));
        vst1q_u32(out + (c + 2) * stride, vreinterpretq_u32_u64(vtrn2q_u64(upper, lower)));
    }
}

// Rows of 16 numbers of 32 bits as columns: out[c * stride + r] = rows[r][c].
inline void transpose(const uint32_t* const* rows, uint32_t* out, int stride) {
    for (int r = 0; r < 16; r += 4) {
        for (int c = 0; c < 16; c += 4) transpose4(rows + r, c, out + c * stride + r, stride);
    }
}

inline Vec load(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    int16x8_t words = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(words)))};
}

// Whole numbers from -128 to 127, rounded to even.
inline void store(int8_t* p, Vec a) {
    int16x4_t words = vmovn_s32(vcvtnq_s32_f32(a.v));
    int32_t four = vget_lane_s32(vreinterpret_s32_s8(vmovn_s16(vcombine_s16(words, words))), 0);
    std::memcpy(p, &four, 4);
}

inline Vec magnitude(Vec a) { return {vabsq_f32(a.v)}; }

inline float sum(Vec a) {
    float32x2_t two = vadd_f32(vget_low_f32(a.v), vget_high_f32(a.v));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

inline float largest(Vec a) { return vmaxvq_f32(a.v); }

inline float half_to_float(uint16_t bits) {
    __fp16 half;
    std::memcpy(&half, &bits, 2);
    return half;
}

// The least float16 that is not below x, for x >= 0.
inline uint16_t half_above(float x) {
    __fp16 half = static_cast<__fp16>(x);
    uint16_t bits;
    std::memcpy(&bits, &half, 2);
    return half_to_float(bits) < x ? bits + 1 : bits;
}

}  // namespace
