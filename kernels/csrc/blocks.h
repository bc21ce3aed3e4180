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
constexpr int BLOCK_WEIGHTS = 256;  // weights that are decoded together: a block, or eight of 32

// Bring memory that is read soon into the cache.
inline void fetch(const uint8_t* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at);
}

inline float half_at(const uint8_t* p) {
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    return half_to_float(bits);
}

// 2^(exponent - 127).
inline float power(int exponent) {
    int32_t bits = exponent << 23;
    float found;
    std::memcpy(&found, &bits, 4);
    return found;
}

// Scales and offsets of the halves of the runs of a block, or of its runs.
struct Scales {
    alignas(64) float scale[16], offset[16];
};

using Bytes = uint8_t __attribute__((vector_size(16)));
using Codes = uint8_t __attribute__((vector_size(32)));  // of a run, in the order of its weights

inline Codes codes_at(const uint8_t* p) {
    Codes found;
    std::memcpy(&found, p, 32);
    return found;
}

// Bits of each byte, moved up, or down by a number below zero. CPUs shift no bytes, but wider numbers,
// whose bits from other bytes `kept` leaves out.
template <int UP>
inline Codes bits_at(const uint8_t* p, int kept) {
    using Wider = uint16_t __attribute__((vector_size(32)));
    Wider bits;
    std::memcpy(&bits, p, 32);
    bits = UP < 0 ? bits >> (UP < 0 ? -UP : 0) : bits << (UP < 0 ? 0 : UP);
    return reinterpret_cast<Codes>(bits) & static_cast<uint8_t>(kept);
}

// 32 nibbles, the lower ones of 16 bytes first.
inline Codes nibbles(const uint8_t* from) {
    Bytes both;
    std::memcpy(&both, from, 16);
#if defined(__x86_64__)  // in registers
    __m256i low = _mm256_castsi128_si256(reinterpret_cast<__m128i>(both & 15));
    return reinterpret_cast<Codes>(
        _mm256_inserti128_si256(low, reinterpret_cast<__m128i>(both >> 4), 1));
#else
    Bytes halves[2] = {both & 15, both >> 4};
    Codes found;
    std::memcpy(&found, halves, 32);
    return found;
#endif
}

// 16 where a bit is set, for 32 bits.
inline Codes sixteens(const uint8_t* bits) {
#if defined(__AVX512F__)
    uint32_t mask;
    std::memcpy(&mask, bits, 4);
    return reinterpret_cast<Codes>(_mm256_maskz_set1_epi8(mask, 16));
#elif defined(__x86_64__)
    int32_t mask;
    std::memcpy(&mask, bits, 4);
    const __m256i byte = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    __m256i mine = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(mask), byte), bit);
    return reinterpret_cast<Codes>(_mm256_and_si256(_mm256_cmpeq_epi8(mine, bit), _mm256_set1_epi8(16)));
#else
    uint64_t spread[4];
    for (int i = 0; i < 4; i++) {  // a byte for each bit
        uint64_t each = bits[i] * 0x0101010101010101u & 0x8040201008040201u;
        spread[i] = (each + 0x7f7f7f7f7f7f7f7fu) >> 3 & 0x1010101010101010u;
    }
    Codes found;
    std::memcpy(&found, spread, 32);
    return found;
#endif
}

// A format says: weights and bytes of a block; whether halves of a run have scales of their own, and
// whether there are offsets; what the code 0 stands for, the next ones counting on, and how many
// codes there are. `prepare` finds the scales of a block, `codes<run>` the codes of a run.

// One scale for 32 weights, as formats named _0 and _1 have it.
template <int HEADER, int CODE_BYTES, int COUNT, int FIRST_CODE, bool WITH_OFFSETS = false>
struct Small {
    static constexpr int NUMBERS = RUN, BYTES = HEADER + CODE_BYTES, LEVELS = COUNT;
    static constexpr int FIRST = FIRST_CODE;
    static constexpr bool HALVES = false, OFFSETS = WITH_OFFSETS;
    static void prepare(const uint8_t* block, Scales& to) {
        to.scale[0] = half_at(block);
        if (OFFSETS) to.offset[0] = -half_at(block + 2);
    }
};

struct Q4_0 : Small<2, 16, 16, -8> {
    template <int>
    static Codes codes(const uint8_t* block) {
        return nibbles(block + 2);
    }
};

struct Q4_1 : Small<4, 16, 16, 0, true> {
    template <int>
    static Codes codes(const uint8_t* block) {
        return nibbles(block + 4);
    }
};

struct Q5_0 : Small<6, 16, 32, -16> {
    template <int>
    static Codes codes(const uint8_t* block) {
        return nibbles(block + 6) | sixteens(block + 2);
    }
};

struct Q5_1 : Small<8, 16, 32, 0, true> {
    template <int>
    static Codes codes(const uint8_t* block) {
        return nibbles(block + 8) | sixteens(block + 4);
    }
};

struct Q8_0 : Small<2, 32, 256, 0> {  // codes are signed
    template <int>
    static Codes codes(const uint8_t* block) {
        return codes_at(block + 2);
    }
};

// Codes are places in a list of values.
struct IQ4_NL : Small<2, 16, 16, 0> {
    static constexpr int8_t VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                          1,    13,   25,  38,  53,  69,  89,  113};
    template <int>
    static Codes codes(const uint8_t* block) {
        return nibbles(block + 2);
    }
};

struct Q2_K {
    static constexpr int NUMBERS = 256, BYTES = 84, LEVELS = 4, FIRST = 0;
    static constexpr bool HALVES = true, OFFSETS = true;
    static void prepare(const uint8_t* block, Scales& to) {
        Bytes both;
        std::memcpy(&both, block, 16);
        int8_t numbers[32];
        Bytes halves[2] = {both & 15, both >> 4};
        std::memcpy(numbers, halves, 32);
        Vec d = set1(half_at(block + 80)), least = set1(half_at(block + 82));
        for (int i = 0; i < 16; i += Vec::WIDTH) {
            store(to.scale + i, load(numbers + i) * d);
            store(to.offset + i, load(numbers + 16 + i) * least);
        }
    }
    template <int R>
    static Codes codes(const uint8_t* block) {
        return bits_at<-(R % 4 * 2)>(block + 16 + R / 4 * 32, 3);
    }
};

struct Q3_K {
    static constexpr int NUMBERS = 256, BYTES = 110, LEVELS = 8, FIRST = -4;
    static constexpr bool HALVES = true, OFFSETS = false;
    static void prepare(const uint8_t* block, Scales& to) {
        uint32_t packed[3], parts[4];  // 4 low bits of scales i and i + 8, then 2 high ones
        std::memcpy(packed, block + 96, 12);
        for (int i = 0; i < 4; i++) {
            uint32_t low = packed[i % 2] >> i / 2 * 4 & 0x0f0f0f0f;
            parts[i] = low | (packed[2] >> i * 2 & 0x03030303) << 4;
        }
        Bytes whole = {};
        std::memcpy(&whole, parts, 16);
        alignas(16) int8_t numbers[16];
        std::memcpy(numbers, &whole, 16);
        Vec d = set1(half_at(block + 108));
        for (int i = 0; i < 16; i += Vec::WIDTH) {
            store(to.scale + i, (load(numbers + i) - set1(32.0f)) * d);
        }
    }
    template <int R>
    static Codes codes(const uint8_t* block) {
        return bits_at<-(R % 4 * 2)>(block + 32 + R / 4 * 32, 3) | bits_at<2 - R>(block, 4);
    }
};

// Scales and offsets of 6 bits each, eight of them in 12 bytes.
#if defined(__x86_64__)
INLINED inline void six_bits(const uint8_t* block, __m256& scales, __m256& offsets) {
    // a number's low bits and its two high ones lie in one byte, or in two
    const __m128i low_at = _mm_setr_epi8(4, 5, 6, 7, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m128i high_at = _mm_setr_epi8(-1, -1, -1, -1, 4, 5, 6, 7, -1, -1, -1, -1, 8, 9, 10, 11);
    __m128i header = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block));
    __m128i low = _mm_shuffle_epi8(header, low_at), high = _mm_shuffle_epi8(header, high_at);
    low = _mm_blend_epi16(low, _mm_srli_epi16(low, 4), 0xc0);
    low = _mm_and_si128(low, _mm_set_epi32(0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f));
    low = _mm_or_si128(low, _mm_and_si128(_mm_srli_epi16(high, 2), _mm_set1_epi8(0x30)));
    __m128 both = _mm_cvtph_ps(header);
    __m256 d = _mm256_broadcastss_ps(both), least = _mm256_broadcastss_ps(_mm_movehdup_ps(both));
    scales = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(low)), d);
    offsets = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(low, 8))), least);
}

inline void six_bits(const uint8_t* block, Scales& to) {
    __m256 scales, offsets;
    six_bits(block, scales, offsets);
    _mm256_store_ps(to.scale, scales);
    _mm256_store_ps(to.offset, offsets);
}
#else
inline void six_bits(const uint8_t* block, Scales& to) {
    uint32_t packed[3], parts[4];
    std::memcpy(packed, block + 4, 12);
    parts[0] = packed[0] & 0x3f3f3f3f;
    parts[1] = (packed[2] & 0x0f0f0f0f) | (packed[0] >> 2 & 0x30303030);
    parts[2] = packed[1] & 0x3f3f3f3f;
    parts[3] = (packed[2] >> 4 & 0x0f0f0f0f) | (packed[1] >> 2 & 0x30303030);
    float d = half_at(block), least = half_at(block + 2);
    int8_t numbers[16];
    std::memcpy(numbers, parts, 16);
    for (int i = 0; i < 8; i += Vec::WIDTH) {
        store(to.scale + i, load(numbers + i) * set1(d));
        store(to.offset + i, load(numbers + 8 + i) * set1(least));
    }
}
#endif

struct Q4_K {
    static constexpr int NUMBERS = 256, BYTES = 144, LEVELS = 16, FIRST = 0;
    static constexpr bool HALVES = false, OFFSETS = true;
    static void prepare(const uint8_t* block, Scales& to) { six_bits(block, to); }
    template <int R>
    static Codes codes(const uint8_t* block) {
        return bits_at<-(R % 2 * 4)>(block + 16 + R / 2 * 32, 15);
    }
};

struct Q5_K {
    static constexpr int NUMBERS = 256, BYTES = 176, LEVELS = 32, FIRST = 0;
    static constexpr bool HALVES = false, OFFSETS = true;
    static void prepare(const uint8_t* block, Scales& to) { six_bits(block, to); }
    template <int R>
    static Codes codes(const uint8_t* block) {
        return bits_at<-(R % 2 * 4)>(block + 48 + R / 2 * 32, 15) | bits_at<4 - R>(block + 16, 16);
    }
};

struct Q6_K {
    static constexpr int NUMBERS = 256, BYTES = 210, LEVELS = 64, FIRST = -32;
    static constexpr bool HALVES = true, OFFSETS = false;
    static void prepare(const uint8_t* block, Scales& to) {
        Vec d = set1(half_at(block + 208));
        const int8_t* numbers = reinterpret_cast<const int8_t*>(block + 192);
        for (int i = 0; i < 16; i += Vec::WIDTH) store(to.scale + i, load(numbers + i) * d);
    }
    template <int R>
    static Codes codes(const uint8_t* block) {
        return bits_at<-(R % 4 / 2 * 4)>(block + R / 4 * 64 + R % 2 * 32, 15) |
               bits_at<4 - R % 4 * 2>(block + 128 + R / 4 * 32, 48);
    }
};

// What codes stand for.
template <class F>
inline Codes values_of(Codes codes) {
    if constexpr (std::is_same_v<F, IQ4_NL>) {
        Bytes values, halves[2];
        std::memcpy(&values, F::VALUES, 16);
        std::memcpy(halves, &codes, 32);
        for (Bytes& half : halves) {
#if defined(__x86_64__)
            half = reinterpret_cast<Bytes>(_mm_shuffle_epi8(reinterpret_cast<__m128i>(values),
                                                            reinterpret_cast<__m128i>(half)));
#else
            half = reinterpret_cast<Bytes>(vqtbl1q_u8(reinterpret_cast<uint8x16_t>(values),
                                                      reinterpret_cast<uint8x16_t>(half)));
#endif
        }
        std::memcpy(&codes, halves, 32);
        return codes;
    } else {
        return codes + static_cast<uint8_t>(F::FIRST);
    }
}

// The weights of a run in float32.
template <class F, int R>
inline void decode_run(const uint8_t* block, const Scales& scales, float* to) {
    alignas(32) int8_t values[RUN];
    Codes found = values_of<F>(F::template codes<R>(block));
    std::memcpy(values, &found, RUN);
    for (int i = 0; i < RUN; i += Vec::WIDTH) {
        int at = F::HALVES ? 2 * R + i / 16 : R;
        Vec weight = load(values + i) * set1(scales.scale[at]);
        if (F::OFFSETS) weight = weight - set1(scales.offset[at]);
        store(to + i, weight);
    }
}

template <class F, int... R>
inline void decode_runs(const uint8_t* block, float* to, std::integer_sequence<int, R...>) {
    Scales scales;
    F::prepare(block, scales);
    (decode_run<F, R>(block, scales, to + R * RUN), ...);
}

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

template <class F>
constexpr bool PLAIN = std::is_same_v<F, F16> || std::is_same_v<F, BF16> || std::is_same_v<F, F32>;

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

// Bytes of as many weights of a row, whole blocks of them.
template <class F>
inline int64_t row_bytes(int inputs) {
    if constexpr (PLAIN<F>) return static_cast<int64_t>(inputs) * F::BYTES;
    else return static_cast<int64_t>(inputs / F::NUMBERS) * F::BYTES;
}

// Blocks of `BLOCK_WEIGHTS` that hold so many weights of a row.
constexpr int64_t weight_blocks(int inputs) { return (inputs + BLOCK_WEIGHTS - 1) / BLOCK_WEIGHTS; }

// Where decoded weights and sums lie is known to the compiler: with strides that it computes for each
// tile, products take a tenth longer.
constexpr int DECODED = 16;        // outputs whose weights are decoded at a time for many rows, a part of a job
constexpr int MOST_DECODED = 512;  // inputs of them
constexpr int64_t SUMS_ROW = DECODED * Vec::WIDTH;  // a row's sums with these outputs, by lanes

// Copies a run's block in the parts in which it is read, which is faster; or clears it.
template <class F>
INLINED inline void copy_run(const uint8_t* from, uint8_t* to) {
    constexpr int HALF_BYTES = F::OFFSETS ? 4 : 2, CODES = F::LEVELS == 256 ? 32 : 16;
    constexpr int BITS = F::NUMBERS == RUN ? F::BYTES - HALF_BYTES - CODES : 0;
    static constexpr uint8_t zeros[F::BYTES] = {0};
    from = from ? from : zeros;
    std::memcpy(to, from, HALF_BYTES);
    std::memcpy(to + HALF_BYTES, from + HALF_BYTES, BITS);
    from += HALF_BYTES + BITS, to += HALF_BYTES + BITS;
#if defined(__x86_64__)
    if (CODES == 32) {
        auto codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), codes);
    }
#endif
    std::memcpy(to, from, CODES);
}

// Calls `visit(block, inputs that are left)` for the blocks of some inputs of a row. Behind the last
// runs are zeros or, where `visit` minds what is left, what follows the row if it can be read.
template <class F, bool MINDS = false, class Visit>
INLINED inline void each_block(const uint8_t* row, int64_t ahead, int inputs, Visit visit) {
    constexpr int BYTES = BLOCK_WEIGHTS / F::NUMBERS * F::BYTES;
    uint8_t whole[BYTES];
    for (int left = inputs; left > 0; left -= BLOCK_WEIGHTS, row += BYTES) {
        fetch(row + ahead, BYTES);
        const uint8_t* block = row;
        if (F::NUMBERS == RUN && left < BLOCK_WEIGHTS && !(MINDS && ahead >= BYTES)) {
            for (int run = 0; run < BLOCK_WEIGHTS / RUN; run++) {
                copy_run<F>(run < left / RUN ? row + run * F::BYTES : nullptr, whole + run * F::BYTES);
            }
            block = whole;
        }
        visit(block, left);
    }
}

// `count` weights of a row from the `first` on; both are multiples of a block's.
template <class F, class To>
void decode_blocks(const uint8_t* row, int first, int count, To* to) {
    row += row_bytes<F>(first);
    if constexpr (PLAIN<F>) {
        for (int i = 0; i < count; i += Vec::WIDTH) store(to + i, number_at(F{}, row + i * F::BYTES));
    } else {
        for (int at = 0; at < count; at += F::NUMBERS, row += F::BYTES) {
            constexpr auto RUNS = std::make_integer_sequence<int, F::NUMBERS / RUN>{};
            if constexpr (std::is_same_v<To, float>) {
                decode_runs<F>(row, to + at, RUNS);
            } else {
                float numbers[F::NUMBERS];
                decode_runs<F>(row, numbers, RUNS);
                for (int i = 0; i < F::NUMBERS; i += Vec::WIDTH) store(to + at + i, load(numbers + i));
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
