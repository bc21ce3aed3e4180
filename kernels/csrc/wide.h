// Vectors of float64, half as many numbers as in a vector of float32, and e^x of them.
#pragma once

#include "vector.h"

namespace {

#if defined(__AVX512F__)

struct Wide {
    static constexpr int WIDTH = 8;
    __m512d v;
};

inline Wide wide(double x) { return {_mm512_set1_pd(x)}; }
inline Wide load(const double* p) { return {_mm512_loadu_pd(p)}; }
inline void store(double* p, Wide a) { _mm512_storeu_pd(p, a.v); }
inline Wide operator+(Wide a, Wide b) { return {_mm512_add_pd(a.v, b.v)}; }
inline Wide operator-(Wide a, Wide b) { return {_mm512_sub_pd(a.v, b.v)}; }
inline Wide operator*(Wide a, Wide b) { return {_mm512_mul_pd(a.v, b.v)}; }
inline Wide fma(Wide a, Wide b, Wide c) { return {_mm512_fmadd_pd(a.v, b.v, c.v)}; }
inline Wide max(Wide a, Wide b) { return {_mm512_max_pd(a.v, b.v)}; }
inline Wide min(Wide a, Wide b) { return {_mm512_min_pd(a.v, b.v)}; }

inline Wide lower(Vec a) { return {_mm512_cvtps_pd(_mm512_castps512_ps256(a.v))}; }
inline Wide upper(Vec a) { return {_mm512_cvtps_pd(_mm512_extractf32x8_ps(a.v, 1))}; }

// The whole number next to each.
inline Wide nearest(Wide a) {
    return {_mm512_roundscale_pd(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

// a * 2^n
inline Wide scaled(Wide a, Wide n) { return {_mm512_scalef_pd(a.v, n.v)}; }

// Which lanes of a are above those of b, a bit each; which are not below them.
inline uint32_t above(Wide a, Wide b) { return _mm512_cmp_pd_mask(a.v, b.v, _CMP_GT_OQ); }
inline uint32_t at_least(Wide a, Wide b) { return _mm512_cmp_pd_mask(a.v, b.v, _CMP_GE_OQ); }

// `a` where the bit is set, else `b`.
inline Wide where(uint32_t bits, Wide a, Wide b) {
    return {_mm512_mask_mov_pd(b.v, static_cast<__mmask8>(bits), a.v)};
}

// The lanes whose bit is set, one after the other; up to WIDTH numbers are written.
inline void store_where(uint32_t bits, Wide a, double* out) {
    _mm512_storeu_pd(out, _mm512_maskz_compress_pd(static_cast<__mmask8>(bits), a.v));
}

inline void store_where(uint32_t bits, const int32_t* ids, int32_t* out) {
    __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ids));
    __m256i some = _mm256_maskz_compress_epi32(static_cast<__mmask8>(bits), all);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), some);
}

#elif defined(__AVX2__)

struct Wide {
    static constexpr int WIDTH = 4;
    __m256d v;
};

inline Wide wide(double x) { return {_mm256_set1_pd(x)}; }
inline Wide load(const double* p) { return {_mm256_loadu_pd(p)}; }
inline void store(double* p, Wide a) { _mm256_storeu_pd(p, a.v); }
inline Wide operator+(Wide a, Wide b) { return {_mm256_add_pd(a.v, b.v)}; }
inline Wide operator-(Wide a, Wide b) { return {_mm256_sub_pd(a.v, b.v)}; }
inline Wide operator*(Wide a, Wide b) { return {_mm256_mul_pd(a.v, b.v)}; }
inline Wide fma(Wide a, Wide b, Wide c) { return {_mm256_fmadd_pd(a.v, b.v, c.v)}; }
inline Wide max(Wide a, Wide b) { return {_mm256_max_pd(a.v, b.v)}; }
inline Wide min(Wide a, Wide b) { return {_mm256_min_pd(a.v, b.v)}; }

inline Wide lower(Vec a) { return {_mm256_cvtps_pd(_mm256_castps256_ps128(a.v))}; }
inline Wide upper(Vec a) { return {_mm256_cvtps_pd(_mm256_extractf128_ps(a.v, 1))}; }

inline Wide nearest(Wide a) {
    return {_mm256_round_pd(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

// n between -1022 and 1023
inline Wide scaled(Wide a, Wide n) {
    __m256d shifted = _mm256_add_pd(n.v, _mm256_set1_pd(6755399441055744.0));  // 1.5 * 2^52
    __m256i bits = _mm256_add_epi64(_mm256_castpd_si256(shifted), _mm256_set1_epi64x(1023));
    return {_mm256_mul_pd(a.v, _mm256_castsi256_pd(_mm256_slli_epi64(bits, 52)))};
}

inline uint32_t above(Wide a, Wide b) {
    return static_cast<uint32_t>(_mm256_movemask_pd(_mm256_cmp_pd(a.v, b.v, _CMP_GT_OQ)));
}
inline uint32_t at_least(Wide a, Wide b) {
    return static_cast<uint32_t>(_mm256_movemask_pd(_mm256_cmp_pd(a.v, b.v, _CMP_GE_OQ)));
}

inline Wide where(uint32_t bits, Wide a, Wide b) {
    __m256i lanes = _mm256_and_si256(_mm256_set1_epi64x(static_cast<int64_t>(bits)),
                                     _mm256_set_epi64x(8, 4, 2, 1));
    __m256i unset = _mm256_cmpeq_epi64(lanes, _mm256_setzero_si256());
    return {_mm256_blendv_pd(a.v, b.v, _mm256_castsi256_pd(unset))};
}

#else  // NEON

struct Wide {
    static constexpr int WIDTH = 2;
    float64x2_t v;
};

inline Wide wide(double x) { return {vdupq_n_f64(x)}; }
inline Wide load(const double* p) { return {vld1q_f64(p)}; }
inline void store(double* p, Wide a) { vst1q_f64(p, a.v); }
inline Wide operator+(Wide a, Wide b) { return {vaddq_f64(a.v, b.v)}; }
inline Wide operator-(Wide a, Wide b) { return {vsubq_f64(a.v, b.v)}; }
inline Wide operator*(Wide a, Wide b) { return {vmulq_f64(a.v, b.v)}; }
inline Wide fma(Wide a, Wide b, Wide c) { return {vfmaq_f64(c.v, a.v, b.v)}; }
inline Wide max(Wide a, Wide b) { return {vmaxq_f64(a.v, b.v)}; }
inline Wide min(Wide a, Wide b) { return {vminq_f64(a.v, b.v)}; }

inline Wide lower(Vec a) { return {vcvt_f64_f32(vget_low_f32(a.v))}; }
inline Wide upper(Vec a) { return {vcvt_high_f64_f32(a.v)}; }

inline Wide nearest(Wide a) { return {vrndnq_f64(a.v)}; }

inline Wide scaled(Wide a, Wide n) {
    int64x2_t bits = vshlq_n_s64(vaddq_s64(vcvtnq_s64_f64(n.v), vdupq_n_s64(1023)), 52);
    return {vmulq_f64(a.v, vreinterpretq_f64_s64(bits))};
}

inline uint32_t bits_of(uint64x2_t lanes) {
    return static_cast<uint32_t>((vgetq_lane_u64(lanes, 0) & 1) | (vgetq_lane_u64(lanes, 1) & 2));
}
inline uint32_t above(Wide a, Wide b) { return bits_of(vcgtq_f64(a.v, b.v)); }
inline uint32_t at_least(Wide a, Wide b) { return bits_of(vcgeq_f64(a.v, b.v)); }

inline Wide where(uint32_t bits, Wide a, Wide b) {
    uint64x2_t set = vcombine_u64(vcreate_u64(bits & 1 ? ~uint64_t{0} : 0),
                                  vcreate_u64(bits & 2 ? ~uint64_t{0} : 0));
    return {vbslq_f64(set, a.v, b.v)};
}

#endif

#if !defined(__AVX512F__)

inline void store_where(uint32_t bits, Wide a, double* out) {
    double all[Wide::WIDTH];
    store(all, a);
    for (; bits; bits &= bits - 1) *out++ = all[__builtin_ctz(bits)];
}

inline void store_where(uint32_t bits, const int32_t* ids, int32_t* out) {
    int32_t all[Wide::WIDTH];
    std::memcpy(all, ids, sizeof(all));
    for (; bits; bits &= bits - 1) *out++ = all[__builtin_ctz(bits)];
}

#endif

inline double sum(Wide a) {
    double lanes[Wide::WIDTH];
    store(lanes, a);
    for (int half = Wide::WIDTH / 2; half; half /= 2) {
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    }
    return lanes[0];
}

// e^x within 2 units in the last place, for x that are not above 0; 0 below -708. NaN stays NaN.
inline Wide exp(Wide x) {
    constexpr double LEAST = -708.0;
    Wide bounded = max(wide(LEAST), x);  // in this order NaN stays NaN
    Wide n = nearest(bounded * wide(1.4426950408889634));
    Wide r = fma(n, wide(-6.93147180369123816490e-01), bounded);
    r = fma(n, wide(-1.90821492927058770002e-10), r);
    // (e^r - 1 - r) / r^2 on [-ln 2 / 2, ln 2 / 2], the polynomial through its values at Chebyshev's
    // points
    Wide q = wide(2.510038549551032e-08);
    q = fma(q, r, wide(2.7620088445409746e-07));
    q = fma(q, r, wide(2.7557268459997064e-06));
    q = fma(q, r, wide(2.4801521295954376e-05));
    q = fma(q, r, wide(0.00019841269863053618));
    q = fma(q, r, wide(0.0013888888917213717));
    q = fma(q, r, wide(0.008333333333330062));
    q = fma(q, r, wide(0.04166666666662413));
    q = fma(q, r, wide(0.16666666666666669));
    q = fma(q, r, wide(0.5));
    Wide result = scaled(fma(fma(q, r, wide(1.0)), r, wide(1.0)), n);
    return where(above(wide(LEAST), x), wide(0.0), result);
}

}  // namespace
