// Weights in blocks, as GGUF files have them: what a run of 32 neighbouring weights is.
//
// A format packs 32 or 256 weights of a row into a block: small whole numbers, and a scale and for
// some formats an offset for each 16 or 32 of them. A weight is scale * code - offset, each step
// rounded to float32: the number that the package `gguf` (quants.py) gives, bit for bit. The layouts
// are those of ggml (ggml-common.h).
#pragma once

#include "native.h"
#include "vector.h"

namespace {

constexpr int RUN = 32;
constexpr int BLOCK = 256;  // weights that are decoded together; a block of 32 is one of its runs

inline float half_at(const uint8_t* p) {
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    return half_to_float(bits);
}

// Scales and offsets of the halves of the runs of a block.
struct Scales {
    alignas(64) float scale[16], offset[16];
};

// A format says: weights and bytes of a block; whether halves of a run have scales of their own, and
// whether there are offsets. `prepare` finds the scales of a block, `codes` the codes of a run.

using Bytes = uint8_t __attribute__((vector_size(16)));

// 32 nibbles, the lower ones of 16 bytes first.
inline void nibbles(const uint8_t* from, Bytes* low, Bytes* high) {
    Bytes both;
    std::memcpy(&both, from, 16);
    *low = both & 15;
    *high = both >> 4;
}

inline Bytes looked_up(Bytes values, Bytes places) {
#if defined(__x86_64__)
    return reinterpret_cast<Bytes>(
        _mm_shuffle_epi8(reinterpret_cast<__m128i>(values), reinterpret_cast<__m128i>(places)));
#else
    return reinterpret_cast<Bytes>(
        vqtbl1q_u8(reinterpret_cast<uint8x16_t>(values), reinterpret_cast<uint8x16_t>(places)));
#endif
}

inline void store_codes(Bytes low, Bytes high, int8_t* to) {
    std::memcpy(to, &low, 16);
    std::memcpy(to + 16, &high, 16);
}

// 32 nibbles plus `first`, and 16 where a bit of `bits` is set.
inline void small_codes(const uint8_t* from, const uint8_t* bits, int first, int8_t* to) {
    Bytes low, high;
    nibbles(from, &low, &high);
    if (bits) {
        uint64_t spread[4];
        for (int i = 0; i < 4; i++) {  // a byte for each bit
            uint64_t each = bits[i] * 0x0101010101010101u & 0x8040201008040201u;
            spread[i] = (each + 0x7f7f7f7f7f7f7f7fu) >> 3 & 0x1010101010101010u;
        }
        Bytes fifth[2];
        std::memcpy(fifth, spread, 32);
        low |= fifth[0];
        high |= fifth[1];
    }
    store_codes(low + static_cast<uint8_t>(first), high + static_cast<uint8_t>(first), to);
}

// One scale for 32 weights in two halves of nibbles, as formats named _0 and _1 have them.
template <int HEADER, int WIDTH_BYTES>
struct Small {
    static constexpr int NUMBERS = RUN, BYTES = HEADER + WIDTH_BYTES;
    static constexpr bool HALVES = false, OFFSETS = false;
    static void prepare(const uint8_t* block, Scales& to) { to.scale[0] = half_at(block); }
};

struct Q4_0 : Small<2, 16> {
    static void codes(const uint8_t* block, int, int8_t* to) {
        small_codes(block + 2, nullptr, -8, to);
    }
};

struct Q4_1 : Small<4, 16> {
    static constexpr bool OFFSETS = true;
    static void prepare(const uint8_t* block, Scales& to) {
        to.scale[0] = half_at(block);
        to.offset[0] = -half_at(block + 2);
    }
    static void codes(const uint8_t* block, int, int8_t* to) {
        small_codes(block + 4, nullptr, 0, to);
    }
};

struct Q5_0 : Small<6, 16> {
    static void codes(const uint8_t* block, int, int8_t* to) {
        small_codes(block + 6, block + 2, -16, to);
    }
};

struct Q5_1 : Small<8, 16> {
    static constexpr bool OFFSETS = true;
    static void prepare(const uint8_t* block, Scales& to) { Q4_1::prepare(block, to); }
    static void codes(const uint8_t* block, int, int8_t* to) {
        small_codes(block + 8, block + 4, 0, to);
    }
};

struct Q8_0 : Small<2, 32> {
    static void codes(const uint8_t* block, int, int8_t* to) { std::memcpy(to, block + 2, RUN); }
};

struct IQ4_NL : Small<2, 16> {
    static void codes(const uint8_t* block, int, int8_t* to) {
        static constexpr int8_t VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                              1,    13,   25,  38,  53,  69,  89,  113};
        Bytes low, high, values;
        nibbles(block + 2, &low, &high);
        std::memcpy(&values, VALUES, 16);
        store_codes(looked_up(values, low), looked_up(values, high), to);
    }
};

struct Q2_K {
    static constexpr int NUMBERS = 256, BYTES = 84;
    static constexpr bool HALVES = true, OFFSETS = true;
    static void prepare(const uint8_t* block, Scales& to) {
        float d = half_at(block + 80), least = half_at(block + 82);
        for (int i = 0; i < 16; i++) {
            to.scale[i] = d * static_cast<float>(block[i] & 15);
            to.offset[i] = least * static_cast<float>(block[i] >> 4);
        }
    }
    static void codes(const uint8_t* block, int run, int8_t* to) {
        const uint8_t* from = block + 16 + run / 4 * 32;
        int shift = run % 4 * 2;
        for (int i = 0; i < RUN; i++) to[i] = static_cast<int8_t>(from[i] >> shift & 3);
    }
};

struct Q3_K {
    static constexpr int NUMBERS = 256, BYTES = 110;
    static constexpr bool HALVES = true, OFFSETS = false;
    static void prepare(const uint8_t* block, Scales& to) {
        const uint8_t* packed = block + 96;  // 4 low bits of scale i and i + 8, then 2 high ones
        float d = half_at(block + 108);
        for (int i = 0; i < 16; i++) {
            int low = packed[i % 8] >> i / 8 * 4 & 15, high = packed[8 + i % 4] >> i / 4 * 2 & 3;
            to.scale[i] = d * static_cast<float>((low | high << 4) - 32);
        }
    }
    static void codes(const uint8_t* block, int run, int8_t* to) {
        const uint8_t* from = block + 32 + run / 4 * 32;
        int shift = run % 4 * 2;
        for (int i = 0; i < RUN; i++) {
            int high = block[i] >> run & 1;
            to[i] = static_cast<int8_t>((from[i] >> shift & 3) + high * 4 - 4);
        }
    }
};

// Scales and offsets of 6 bits each, eight of them in 12 bytes.
inline void six_bits(const uint8_t* block, Scales& to) {
    uint32_t packed[3], parts[4];
    std::memcpy(packed, block + 4, 12);
    parts[0] = packed[0] & 0x3f3f3f3f;
    parts[1] = (packed[2] & 0x0f0f0f0f) | (packed[0] >> 2 & 0x30303030);
    parts[2] = packed[1] & 0x3f3f3f3f;
    parts[3] = (packed[2] >> 4 & 0x0f0f0f0f) | (packed[1] >> 2 & 0x30303030);
    int8_t numbers[16];
    std::memcpy(numbers, parts, 16);
    Vec d = set1(half_at(block)), least = set1(half_at(block + 2));
#if defined(__AVX512F__)
    Vec both{_mm512_insertf32x8(d.v, _mm512_castps512_ps256(least.v), 1)};
    Vec found = load(numbers) * both;
    _mm256_store_ps(to.scale, _mm512_castps512_ps256(found.v));
    _mm256_store_ps(to.offset, _mm512_extractf32x8_ps(found.v, 1));
#else
    for (int i = 0; i < 8; i += Vec::WIDTH) {
        store(to.scale + i, load(numbers + i) * d);
        store(to.offset + i, load(numbers + 8 + i) * least);
    }
#endif
}

struct Q4_K {
    static constexpr int NUMBERS = 256, BYTES = 144;
    static constexpr bool HALVES = false, OFFSETS = true;
    static void prepare(const uint8_t* block, Scales& to) { six_bits(block, to); }
    static void codes(const uint8_t* block, int run, int8_t* to) {
        const uint8_t* from = block + 16 + run / 2 * 32;
        int shift = run % 2 * 4;
        for (int i = 0; i < RUN; i++) to[i] = static_cast<int8_t>(from[i] >> shift & 15);
    }
};

struct Q5_K {
    static constexpr int NUMBERS = 256, BYTES = 176;
    static constexpr bool HALVES = false, OFFSETS = true;
    static void prepare(const uint8_t* block, Scales& to) { six_bits(block, to); }
    static void codes(const uint8_t* block, int run, int8_t* to) {
        const uint8_t *from = block + 48 + run / 2 * 32, *high = block + 16;
        int shift = run % 2 * 4;
        for (int i = 0; i < RUN; i++) {
            to[i] = static_cast<int8_t>((from[i] >> shift & 15) | (high[i] >> run & 1) << 4);
        }
    }
};

struct Q6_K {
    static constexpr int NUMBERS = 256, BYTES = 210;
    static constexpr bool HALVES = true, OFFSETS = false;
    static void prepare(const uint8_t* block, Scales& to) {
        Vec d = set1(half_at(block + 208));
        const int8_t* numbers = reinterpret_cast<const int8_t*>(block + 192);
        for (int i = 0; i < 16; i += Vec::WIDTH) store(to.scale + i, load(numbers + i) * d);
    }
    static void codes(const uint8_t* block, int run, int8_t* to) {
        const uint8_t* low = block + run / 4 * 64 + run % 2 * 32;
        const uint8_t* high = block + 128 + run / 4 * 32;
        int nibble = run % 4 / 2 * 4, pair = run % 4 * 2;
        for (int i = 0; i < RUN; i++) {
            int code = (low[i] >> nibble & 15) | (high[i] >> pair & 3) << 4;
            to[i] = static_cast<int8_t>(code - 32);
        }
    }
};

// The weights of a run in float32.
template <class F>
inline void decode_run(const uint8_t* block, const Scales& scales, int run, float* to) {
    alignas(64) int8_t codes[RUN];
    F::codes(block, run, codes);
    for (int i = 0; i < RUN; i += Vec::WIDTH) {
        int at = F::HALVES ? 2 * run + i / 16 : run;
        Vec weight = load(codes + i) * set1(scales.scale[at]);
        if (F::OFFSETS) weight = weight - set1(scales.offset[at]);
        store(to + i, weight);
    }
}

#if defined(__AVX512BF16__)

// In bfloat16, rounded once.
template <class F>
inline void decode_run(const uint8_t* block, const Scales& scales, int run, bf16* to) {
    const float *scale = scales.scale + (F::HALVES ? 2 * run : run);
    const float *offset = scales.offset + (F::HALVES ? 2 * run : run);
    constexpr int second = F::HALVES ? 1 : 0;
    alignas(64) int8_t codes[RUN];
    F::codes(block, run, codes);
    Vec low = load(codes) * set1(scale[0]), high = load(codes + 16) * set1(scale[second]);
    if (F::OFFSETS) {
        low = low - set1(offset[0]);
        high = high - set1(offset[second]);
    }
    _mm512_storeu_si512(to, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high.v, low.v)));
}

#else

template <class F>
inline void decode_run(const uint8_t* block, const Scales& scales, int run, bf16* to) {
    float numbers[RUN];
    decode_run<F>(block, scales, run, numbers);
    for (int i = 0; i < RUN; i += Vec::WIDTH) store(to + i, load(numbers + i));
}

#endif

// Formats without codes: numbers of 16 or 32 bits.
struct F16 {
    static constexpr int BYTES = 2;
};
struct BF16 {
    static constexpr int BYTES = 2;
};
struct F32 {
    static constexpr int BYTES = 4;
};

inline Vec number_at(F16, const uint8_t* p) {
#if defined(__AVX512F__)
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
#elif defined(__x86_64__)
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
#else
    float numbers[Vec::WIDTH];
    for (int i = 0; i < Vec::WIDTH; i++) numbers[i] = half_at(p + 2 * i);
    return load(numbers);
#endif
}
inline Vec number_at(BF16, const uint8_t* p) { return load(reinterpret_cast<const bf16*>(p)); }
inline Vec number_at(F32, const uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }

// `count` weights of a row from the `first` on; both are multiples of a block's.
template <class F, class To>
void decode_blocks(const uint8_t* row, int first, int count, To* to) {
    if constexpr (std::is_same_v<F, F16> || std::is_same_v<F, BF16> || std::is_same_v<F, F32>) {
        row += static_cast<int64_t>(first) * F::BYTES;
        for (int i = 0; i < count; i += Vec::WIDTH) store(to + i, number_at(F{}, row + i * F::BYTES));
    } else {
        row += static_cast<int64_t>(first / F::NUMBERS) * F::BYTES;
        for (int at = 0; at < count; at += F::NUMBERS, row += F::BYTES) {
            Scales scales;
            F::prepare(row, scales);
            WRITTEN_OUT
            for (int run = 0; run < F::NUMBERS / RUN; run++) {
                decode_run<F>(row, scales, run, to + at + run * RUN);
            }
        }
    }
}

// Calls `visit` with the format of a number: ggml's number of it, after `BLOCKS`.
template <class Visit>
inline void with_format(int32_t number, Visit visit) {
    switch (number - arbor::BLOCKS) {
        case 0: return visit(F32{});
        case 1: return visit(F16{});
        case 2: return visit(Q4_0{});
        case 3: return visit(Q4_1{});
        case 6: return visit(Q5_0{});
        case 7: return visit(Q5_1{});
        case 8: return visit(Q8_0{});
        case 10: return visit(Q2_K{});
        case 11: return visit(Q3_K{});
        case 12: return visit(Q4_K{});
        case 13: return visit(Q5_K{});
        case 14: return visit(Q6_K{});
        case 20: return visit(IQ4_NL{});
        case 30: return visit(BF16{});
    }
}

}  // namespace
