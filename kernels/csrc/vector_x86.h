// Vectors in AVX-512, or in AVX2 and FMA.
#pragma once

#include <immintrin.h>

#include "number.h"

namespace {

#if defined(__AVX512F__)

struct Vec {
    static constexpr int WIDTH = 16;
    __m512 v;
};

inline Vec set1(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }

inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }

// Which of 16 whole numbers are not above a limit, a bit each.
inline uint16_t up_to(const uint32_t* keys, uint32_t limit) {
    return _mm512_cmple_epu32_mask(_mm512_loadu_si512(keys),
                                   _mm512_set1_epi32(static_cast<int32_t>(limit)));
}

// The keys between two others, both included, in their order; how many there are. `out` may be the
// keys; it has room for 16 more than that.
inline int64_t store_between(const uint32_t* keys, int64_t count, uint32_t low, uint32_t high,
                             uint32_t* out) {
    __m512i from = _mm512_set1_epi32(static_cast<int32_t>(low));
    __m512i span = _mm512_set1_epi32(static_cast<int32_t>(high - low));
    int64_t found = 0;
    for (int64_t i = 0; i < count; i += 16) {
        __mmask16 here = count - i < 16 ? first_lanes(static_cast<int>(count - i)) : 0xffff;
        __m512i key = _mm512_maskz_loadu_epi32(here, keys + i);
        here = _mm512_mask_cmple_epu32_mask(here, _mm512_sub_epi32(key, from), span);
        _mm512_storeu_si512(out + found, _mm512_maskz_compress_epi32(here, key));
        found += __builtin_popcount(here);
    }
    return found;
}

// The places of the bits that are set, after `base`; how many there are.
inline int store_places(uint16_t bits, int32_t base, int32_t* out) {
    __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512i places = _mm512_add_epi32(_mm512_set1_epi32(base), lanes);
    int count = __builtin_popcount(bits);
    _mm512_mask_storeu_epi32(out, first_lanes(count), _mm512_maskz_compress_epi32(bits, places));
    return count;
}

// The first n (< WIDTH) numbers; the other lanes are `rest`.
inline Vec load_first(const float* p, int n, float rest) {
    return {_mm512_mask_loadu_ps(_mm512_set1_ps(rest), first_lanes(n), p)};
}

inline void store_first(float* p, int n, Vec a) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }

inline Vec widen(__m256i half) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
}

inline Vec load(const bf16* p) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

inline Vec load_first(const bf16* p, int n, float rest) {
    __m256i half = _mm256_set1_epi16(0);
    bf16 few[16] = {0};
    std::memcpy(few, p, static_cast<size_t>(n) * 2);
    half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(few));
    return {_mm512_mask_mov_ps(_mm512_set1_ps(rest), first_lanes(n), widen(half).v)};
}

// Rounded to nearest, ties to even; NaN stays NaN.
inline __m256i narrow(Vec a) {
    __m512i bits = _mm512_castps_si512(a.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

inline void store(bf16* p, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a)); }

inline void store_first(bf16* p, int n, Vec a) {
    bf16 all[16];
    store(all, a);
    std::memcpy(p, all, static_cast<size_t>(n) * 2);
}

// 2^n for whole n between -126 and 127.
inline Vec power_of_two(Vec n) {
    __m512i bits = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 23))};
}

inline Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT)}; }

// `a` where x >= limit or x is NaN, else 0.
inline Vec zero_below(Vec a, Vec x, float limit) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_NLT_UQ), a.v)};
}

inline __m256 halves_sum(Vec a) {
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
    return _mm256_add_ps(_mm512_castps512_ps256(a.v), high);
}

inline __m256 halves_max(Vec a) {
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
    return _mm256_max_ps(_mm512_castps512_ps256(a.v), high);
}

// The numbers of WIDTH pairs of bfloat16: those at even places, and those at odd ones.
inline Vec even_of(const void* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}

inline Vec odd_of(const void* p) {
    return {_mm512_castsi512_ps(
        _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
}

// Rows of 16 numbers of 32 bits as columns: out[c * stride + r] = rows[r][c].
inline void transpose(const uint32_t* const* rows, uint32_t* out, int stride) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i]);
    for (int i = 0; i < 8; i++) {
        b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < 2; j++) {
            a[4 * i + 2 * j] = _mm512_unpacklo_epi64(b[4 * i + j], b[4 * i + 2 + j]);
            a[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(b[4 * i + j], b[4 * i + 2 + j]);
        }
    }
    // a[4 i + c]: column c of rows 4 i .. 4 i + 3, and in the other lanes columns c + 4, + 8, + 12
    for (int c = 0; c < 4; c++) {
        __m512i low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
        __m512i low2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
        __m512i high = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
        __m512i high2 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
        b[c] = _mm512_shuffle_i32x4(low, low2, 0x88);
        b[8 + c] = _mm512_shuffle_i32x4(low, low2, 0xdd);
        b[4 + c] = _mm512_shuffle_i32x4(high, high2, 0x88);
        b[12 + c] = _mm512_shuffle_i32x4(high, high2, 0xdd);
    }
    for (int c = 0; c < 16; c++) _mm512_storeu_si512(out + c * stride, b[c]);
}

inline Vec load(const int8_t* p) {
    __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes))};
}

// Whole numbers from -128 to 127, rounded to even.
inline void store(int8_t* p, Vec a) {
    __m128i codes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), codes);
}

inline Vec magnitude(Vec a) { return {_mm512_abs_ps(a.v)}; }

#if defined(__AVX512BF16__)

#define HAS_PAIRS

// Two factors in bfloat16, for pairs of numbers.
struct Pair {
    __m512bh v;
};

inline Pair pair_of(const bf16* x) {
    uint32_t bits;
    std::memcpy(&bits, x, 4);
    return {reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(bits)))};
}

inline Vec fma(Pair factors, const void* pairs, Vec sums) {
    __m512i numbers = _mm512_loadu_si512(pairs);
    return {_mm512_dpbf16_ps(sums.v, reinterpret_cast<__m512bh>(numbers), factors.v)};
}

#endif

#else  // AVX2 and FMA

struct Vec {
    static constexpr int WIDTH = 8;
    __m256 v;
};

inline Vec set1(float x) { return {_mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }

inline Vec load_first(const float* p, int n, float rest) {
    float all[8];
    for (float& x : all) x = rest;
    std::memcpy(all, p, static_cast<size_t>(n) * 4);
    return load(all);
}

inline void store_first(float* p, int n, Vec a) {
    float all[8];
    store(all, a);
    std::memcpy(p, all, static_cast<size_t>(n) * 4);
}

inline Vec load(const bf16* p) {
    __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))};
}

inline Vec load_first(const bf16* p, int n, float rest) {
    float all[8];
    for (int i = 0; i < 8; i++) all[i] = i < n ? to_float(p[i]) : rest;
    return load(all);
}

inline void store(bf16* p, Vec a) {
    __m256i bits = _mm256_castps_si256(a.v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
    rounded = _mm256_srli_epi32(rounded, 16);
    __m256i packed = _mm256_packus_epi32(rounded, rounded);
    packed = _mm256_permute4x64_epi64(packed, 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

inline void store_first(bf16* p, int n, Vec a) {
    bf16 all[8];
    store(all, a);
    std::memcpy(p, all, static_cast<size_t>(n) * 2);
}

inline Vec power_of_two(Vec n) {
    __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(bits, 23))};
}

inline Vec round(Vec a) {
    return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

inline Vec zero_below(Vec a, Vec x, float limit) {
    return {_mm256_and_ps(_mm256_cmp_ps(x.v, _mm256_set1_ps(limit), _CMP_NLT_UQ), a.v)};
}

inline __m256 halves_sum(Vec a) { return a.v; }
inline __m256 halves_max(Vec a) { return a.v; }

inline Vec even_of(const void* p) {
    __m256i pairs = _mm256_loadu_si256(static_cast<const __m256i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16))};
}

inline Vec odd_of(const void* p) {
    __m256i pairs = _mm256_loadu_si256(static_cast<const __m256i*>(p));
    __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    return {_mm256_castsi256_ps(_mm256_and_si256(pairs, upper))};
}

inline void transpose8(const uint32_t* const* rows, int column, uint32_t* out, int stride) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i++) {
        a[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(rows[i] + column));
    }
    for (int i = 0; i < 4; i++) {
        b[2 * i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        a[4 * i] = _mm256_shuffle_ps(b[4 * i], b[4 * i + 2], 0x44);
        a[4 * i + 1] = _mm256_shuffle_ps(b[4 * i], b[4 * i + 2], 0xee);
        a[4 * i + 2] = _mm256_shuffle_ps(b[4 * i + 1], b[4 * i + 3], 0x44);
        a[4 * i + 3] = _mm256_shuffle_ps(b[4 * i + 1], b[4 * i + 3], 0xee);
    }
    for (int c = 0; c < 4; c++) {
        float* low = reinterpret_cast<float*>(out + c * stride);
        float* high = reinterpret_cast<float*>(out + (c + 4) * stride);
        _mm256_storeu_ps(low, _mm256_permute2f128_ps(a[c], a[4 + c], 0x20));
        _mm256_storeu_ps(high, _mm256_permute2f128_ps(a[c], a[4 + c], 0x31));
    }
}

// Rows of 16 numbers of 32 bits as columns: out[c * stride + r] = rows[r][c].
inline void transpose(const uint32_t* const* rows, uint32_t* out, int stride) {
    for (int r = 0; r < 16; r += 8) {
        for (int c = 0; c < 16; c += 8) transpose8(rows + r, c, out + c * stride + r, stride);
    }
}

inline Vec load(const int8_t* p) {
    __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes))};
}

inline void store(int8_t* p, Vec a) {
    __m256i whole = _mm256_cvtps_epi32(a.v);
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole),
                                    _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

inline Vec magnitude(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }

#endif

inline float sum(Vec a) {
    __m256 eight = halves_sum(a);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline float largest(Vec a) {
    __m256 eight = halves_max(a);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline float half_to_float(uint16_t bits) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
}

inline uint16_t half_above(float x) {
    __m128i half = _mm_cvtps_ph(_mm_set_ss(x), _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
    return static_cast<uint16_t>(_mm_extract_epi16(half, 0));
}

}  // namespace
