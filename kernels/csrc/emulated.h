// Instructions of x86-64 that this machine may lack, as functions over AVX2: what a kernel of any
// instruction set computes can then be tested on any CPU. `build.py --emulate` includes it first.
//
// AVX-512 is SIMD Everywhere's (libsimde-dev of Debian); here is what its version 0.7.4 lacks or has
// wrong, and the tiles of AMX. Real dot products of bfloat16 round otherwise in the last bit.
#pragma once

#include <immintrin.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#define SIMDE_X86_AVX512F_ENABLE_NATIVE_ALIASES
#define SIMDE_X86_AVX512BW_ENABLE_NATIVE_ALIASES
#define SIMDE_X86_AVX512VL_ENABLE_NATIVE_ALIASES
#define SIMDE_X86_AVX512DQ_ENABLE_NATIVE_ALIASES
#define SIMDE_X86_AVX512VNNI_ENABLE_NATIVE_ALIASES
#define SIMDE_X86_AVX512BF16_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

using Floats = simde__m512_private;
using Doubles = simde__m512d_private;
using Wholes = simde__m512i_private;

inline Floats parts(simde__m512 a) { return simde__m512_to_private(a); }
inline Doubles parts(simde__m512d a) { return simde__m512d_to_private(a); }
inline Wholes parts(simde__m512i a) { return simde__m512i_to_private(a); }
inline simde__m512 whole(Floats a) { return simde__m512_from_private(a); }
inline simde__m512d whole(Doubles a) { return simde__m512d_from_private(a); }
inline simde__m512i whole(Wholes a) { return simde__m512i_from_private(a); }

template <class To, class Make>
To filled(int count, Make make) {
    To made = {};
    for (int i = 0; i < count; i++) make(made, i);
    return made;
}

// Multiplications and additions in one rounding

inline simde__m512 emulated_fmadd_ps(simde__m512 a, simde__m512 b, simde__m512 c) {
    return whole(filled<Floats>(2, [&](Floats& r, int i) {
        r.m256[i] = _mm256_fmadd_ps(parts(a).m256[i], parts(b).m256[i], parts(c).m256[i]);
    }));
}
inline simde__m512 emulated_fnmadd_ps(simde__m512 a, simde__m512 b, simde__m512 c) {
    return whole(filled<Floats>(2, [&](Floats& r, int i) {
        r.m256[i] = _mm256_fnmadd_ps(parts(a).m256[i], parts(b).m256[i], parts(c).m256[i]);
    }));
}
inline simde__m512d emulated_fmadd_pd(simde__m512d a, simde__m512d b, simde__m512d c) {
    return whole(filled<Doubles>(2, [&](Doubles& r, int i) {
        r.m256d[i] = _mm256_fmadd_pd(parts(a).m256d[i], parts(b).m256d[i], parts(c).m256d[i]);
    }));
}
inline simde__m512i emulated_madd_epi16(simde__m512i a, simde__m512i b) {
    return whole(filled<Wholes>(2, [&](Wholes& r, int i) {
        r.m256i[i] = _mm256_madd_epi16(parts(a).m256i[i], parts(b).m256i[i]);
    }));
}

inline __m256i emulated_256_dpwssd(__m256i sums, __m256i a, __m256i b) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
}
inline simde__m512i emulated_srai_epi32(simde__m512i a, unsigned bits) {
    return whole(filled<Wholes>(2, [&](Wholes& r, int i) {
        r.m256i[i] = _mm256_srai_epi32(parts(a).m256i[i], static_cast<int>(bits));
    }));
}

// Quarters and halves

inline simde__m512 emulated_shuffle_f32x4(simde__m512 a, simde__m512 b, int places) {
    return whole(filled<Floats>(16, [&](Floats& r, int i) {
        int quarter = places >> 2 * (i / 4) & 3;
        r.f32[i] = parts(i < 8 ? a : b).f32[4 * quarter + i % 4];
    }));
}
inline __m256 emulated_extractf32x8_ps(simde__m512 a, int half) { return parts(a).m256[half]; }

// Conversions

inline simde__m512 emulated_cvtepi32_ps(simde__m512i a) {
    return whole(filled<Floats>(2, [&](Floats& r, int i) {
        r.m256[i] = _mm256_cvtepi32_ps(parts(a).m256i[i]);
    }));
}
inline simde__m512i emulated_cvtps_epi32(simde__m512 a) {
    return whole(filled<Wholes>(2, [&](Wholes& r, int i) {
        r.m256i[i] = _mm256_cvtps_epi32(parts(a).m256[i]);
    }));
}
inline simde__m512i emulated_maskz_cvtps_epi32(__mmask16 k, simde__m512 a) {
    Wholes all = parts(emulated_cvtps_epi32(a));
    return whole(filled<Wholes>(16, [&](Wholes& r, int i) { r.i32[i] = k >> i & 1 ? all.i32[i] : 0; }));
}
inline simde__m512d emulated_cvtps_pd(__m256 a) {
    return whole(filled<Doubles>(8, [&](Doubles& r, int i) { r.f64[i] = a[i]; }));
}
inline simde__m512 emulated_cvtph_ps(__m256i a) {
    __m128i halves[] = {_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)};
    return whole(filled<Floats>(2, [&](Floats& r, int i) { r.m256[i] = _mm256_cvtph_ps(halves[i]); }));
}
inline simde__m512i emulated_cvtepi8_epi32(__m128i a) {
    __m128i halves[] = {a, _mm_srli_si128(a, 8)};
    return whole(filled<Wholes>(2, [&](Wholes& r, int i) { r.m256i[i] = _mm256_cvtepi8_epi32(halves[i]); }));
}
inline simde__m512i emulated_cvtepu16_epi32(__m256i a) {
    __m128i halves[] = {_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)};
    return whole(filled<Wholes>(2, [&](Wholes& r, int i) { r.m256i[i] = _mm256_cvtepu16_epi32(halves[i]); }));
}
inline __m256i emulated_cvtepi32_epi16(simde__m512i a) {
    int16_t low[16];
    for (int i = 0; i < 16; i++) low[i] = static_cast<int16_t>(parts(a).i32[i]);
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low));
}
inline __m128i emulated_cvtepi32_epi8(simde__m512i a) {
    int8_t low[16];
    for (int i = 0; i < 16; i++) low[i] = static_cast<int8_t>(parts(a).i32[i]);
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
}
inline __m128i emulated_cvtepi64_epi16(simde__m512i a) {
    int16_t low[8];
    for (int i = 0; i < 8; i++) low[i] = static_cast<int16_t>(parts(a).i64[i]);
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
}

// Masks

inline __mmask16 emulated_mask_cmple_epu32(__mmask16 k, simde__m512i a, simde__m512i b) {
    int found = 0;
    for (int i = 0; i < 16; i++) found |= (parts(a).u32[i] <= parts(b).u32[i]) << i;
    return static_cast<__mmask16>(found & k);
}
inline simde__m512 emulated_mask_loadu_ps(simde__m512 other, __mmask16 k, const void* p) {
    const float* from = static_cast<const float*>(p);
    return whole(filled<Floats>(16, [&](Floats& r, int i) {
        r.f32[i] = k >> i & 1 ? from[i] : parts(other).f32[i];
    }));
}
inline simde__m512i emulated_maskz_loadu_epi32(__mmask16 k, const void* p) {
    const uint8_t* from = static_cast<const uint8_t*>(p);
    return whole(filled<Wholes>(16, [&](Wholes& r, int i) {
        if (k >> i & 1) std::memcpy(&r.i32[i], from + 4 * i, 4);
    }));
}
inline void emulated_mask_storeu_epi32(void* p, __mmask16 k, simde__m512i a) {
    for (int i = 0; i < 16; i++) {
        int32_t number = parts(a).i32[i];
        if (k >> i & 1) std::memcpy(static_cast<uint8_t*>(p) + 4 * i, &number, 4);
    }
}
inline void emulated_mask_storeu_ps(void* p, __mmask16 k, simde__m512 a) {
    for (int i = 0; i < 16; i++) {
        if (k >> i & 1) static_cast<float*>(p)[i] = parts(a).f32[i];
    }
}
inline float emulated_mask_reduce_max_ps(__mmask16 k, simde__m512 a) {
    float most = -INFINITY;
    for (int i = 0; i < 16; i++) most = k >> i & 1 && parts(a).f32[i] > most ? parts(a).f32[i] : most;
    return most;
}
inline __m256i emulated_256_maskz_set1_epi8(__mmask32 k, char a) {
    int8_t each[32];
    for (int i = 0; i < 32; i++) each[i] = k >> i & 1 ? a : 0;
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(each));
}

// Tiles

struct Tile {
    alignas(64) uint8_t bytes[16][64];
};
struct Tiles {
    Tile tile[8];
    uint8_t rows[8];
    uint16_t columns[8];  // in bytes
};
inline Tiles& tiles() {
    static thread_local Tiles each;
    return each;
}
inline void emulated_tile_loadconfig(const void* shapes) {
    const uint8_t* from = static_cast<const uint8_t*>(shapes);
    std::memcpy(tiles().columns, from + 16, sizeof(tiles().columns));
    std::memcpy(tiles().rows, from + 48, sizeof(tiles().rows));
    std::memset(tiles().tile, 0, sizeof(tiles().tile));
}
inline void emulated_tile_zero(int to) { std::memset(&tiles().tile[to], 0, sizeof(Tile)); }
inline void emulated_tile_loadd(int to, const void* base, int64_t stride) {
    emulated_tile_zero(to);
    for (int row = 0; row < tiles().rows[to]; row++) {
        std::memcpy(tiles().tile[to].bytes[row], static_cast<const uint8_t*>(base) + row * stride,
                    tiles().columns[to]);
    }
}
inline void emulated_tile_stored(int from, void* base, int64_t stride) {
    for (int row = 0; row < tiles().rows[from]; row++) {
        std::memcpy(static_cast<uint8_t*>(base) + row * stride, tiles().tile[from].bytes[row],
                    tiles().columns[from]);
    }
}
inline float emulated_bfloat16(const uint8_t* p) {
    uint32_t bits = static_cast<uint32_t>(p[0]) << 16 | static_cast<uint32_t>(p[1]) << 24;
    float number;
    std::memcpy(&number, &bits, 4);
    return number;
}
inline void emulated_tile_dpbf16ps(int sums, int left, int right) {
    Tiles& all = tiles();
    for (int row = 0; row < all.rows[sums]; row++) {
        float* sum = reinterpret_cast<float*>(all.tile[sums].bytes[row]);
        for (int pair = 0; pair < all.columns[left] / 4; pair++) {
            const uint8_t* x = all.tile[left].bytes[row] + 4 * pair;
            for (int column = 0; column < all.columns[sums] / 4; column++) {
                const uint8_t* y = all.tile[right].bytes[pair] + 4 * column;
                sum[column] += emulated_bfloat16(x) * emulated_bfloat16(y) +
                               emulated_bfloat16(x + 2) * emulated_bfloat16(y + 2);
            }
        }
    }
}

}  // namespace

#undef _mm512_extractf32x8_ps
#undef _mm512_shuffle_f32x4
#undef _mm512_fmadd_ps
#undef _mm512_fnmadd_ps
#undef _mm512_fmadd_pd
#undef _mm512_madd_epi16
#undef _mm512_mask_cmple_epu32_mask
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _mm512_fmadd_ps emulated_fmadd_ps
#define _mm512_fnmadd_ps emulated_fnmadd_ps
#define _mm512_fmadd_pd emulated_fmadd_pd
#define _mm512_madd_epi16 emulated_madd_epi16
#define _mm256_dpwssd_avx_epi32 emulated_256_dpwssd
#define _mm512_srai_epi32 emulated_srai_epi32
#define _mm512_shuffle_f32x4 emulated_shuffle_f32x4
#define _mm512_extractf32x8_ps emulated_extractf32x8_ps
#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_cvtps_epi32 emulated_cvtps_epi32
#define _mm512_maskz_cvtps_epi32 emulated_maskz_cvtps_epi32
#define _mm512_cvtps_pd emulated_cvtps_pd
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_cvtepi8_epi32 emulated_cvtepi8_epi32
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#define _mm512_cvtepi32_epi16 emulated_cvtepi32_epi16
#define _mm512_cvtepi32_epi8 emulated_cvtepi32_epi8
#define _mm512_cvtepi64_epi16 emulated_cvtepi64_epi16
#define _mm512_mask_cmple_epu32_mask emulated_mask_cmple_epu32
#define _mm512_mask_loadu_ps emulated_mask_loadu_ps
#define _mm512_maskz_loadu_epi32 emulated_maskz_loadu_epi32
#define _mm512_mask_storeu_epi32 emulated_mask_storeu_epi32
#define _mm512_mask_storeu_ps emulated_mask_storeu_ps
#define _mm512_mask_reduce_max_ps emulated_mask_reduce_max_ps
#define _mm256_maskz_set1_epi8 emulated_256_maskz_set1_epi8
#define _tile_loadconfig emulated_tile_loadconfig
#define _tile_release() static_cast<void>(0)
#define _tile_zero emulated_tile_zero
#define _tile_loadd emulated_tile_loadd
#define _tile_stored emulated_tile_stored
#define _tile_dpbf16ps emulated_tile_dpbf16ps

// what the kernels are told they have; this header's own includes were told the truth
#define ARBOR_EMULATED
#if defined(EMULATE_AVX_VNNI)
#define __AVXVNNI__ 1
#else
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512VL__ 1
#define __AVX512DQ__ 1
#endif
#ifdef EMULATE_VNNI
#define __AVX512VNNI__ 1
#endif
#ifdef EMULATE_BF16
#define __AVX512BF16__ 1
#endif
#ifdef EMULATE_AMX
#define __AMX_BF16__ 1
#endif
