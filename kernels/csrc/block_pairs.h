// Codes of blocks as pairs, for x in bfloat16 and CPUs with AVX-512.
//
// A block's 256 weights are 16 groups of 16, each with one scale. Eight products of 32 numbers sum
// them so that a lane holds the sum of one group alone; the sixteen sums are then scaled together,
// and offsets are met by the sums of x over groups. Every weight is exact.
//
// Where the CPU multiplies pairs of bfloat16 (AVX-512 BF16), codes and x are such numbers: whole ones
// up to 256 are exact. Elsewhere both are whole numbers of 16 bits, x in units of each group's own:
// exact but for numbers below 1/128 of the largest of their group, which are rounded to 2^-15 of it.
#pragma once

#include "blocks.h"

#if defined(__AVX512F__)

namespace {

#if defined(__AVX512BF16__)

struct WidePairs {
    using X = bf16;
    static constexpr int STEP = 32, ROWS = 6;
    struct Part {
        __m512bh v;
    };
    static Part part(const bf16* p) { return {reinterpret_cast<__m512bh>(_mm512_loadu_si512(p))}; }
    static Vec add(Vec sum, Part x, Part weight) { return {_mm512_dpbf16_ps(sum.v, x.v, weight.v)}; }
};

constexpr bf16 bfloat16_of(int whole) {
    int size = whole < 0 ? -whole : whole, exponent = 0;
    if (!size) return 0;
    while (size >> (exponent + 1)) exponent++;
    int fraction = (size << 7 >> exponent) & 127;
    return static_cast<bf16>((whole < 0 ? 0x8000 : 0) | (127 + exponent) << 7 | fraction);
}

// Pairs of bfloat16: codes, numbers of x and their products' sums.
struct CodePairs {
    static constexpr bool WHOLE = false;
    using Number = bf16;
    using Sums = __m512;
    static constexpr Number number(int code) { return bfloat16_of(code); }
    static __m512 sums_of_pairs(__m512i x) {
        __m512i second = _mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
        return _mm512_add_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), _mm512_castsi512_ps(second));
    }
    // 16 numbers of a group; the unit that they are in.
    static float read(const bf16* from, Number* to) {
        std::memcpy(to, from, 16 * sizeof(Number));
        return 1.0f;
    }
    static Sums none() { return _mm512_setzero_ps(); }
    static Sums add(Sums sums, __m512i x, __m512i codes) {
        return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(codes));
    }
    // Sums of groups, scaled and added to a total.
    static __m512 scaled(Sums sums, __m512 scale, const char*, __m512 total) {
        return _mm512_fmadd_ps(sums, scale, total);
    }
};

#else

// Pairs of whole numbers; x has a unit for each group.
struct CodePairs {
    static constexpr bool WHOLE = true;
    using Number = int16_t;
    using Sums = __m512i;
    static constexpr Number number(int code) { return static_cast<int16_t>(code); }
    static __m512 sums_of_pairs(__m512i x) {
        return _mm512_cvtepi32_ps(_mm512_madd_epi16(x, _mm512_set1_epi16(1)));
    }
    static Sums none() { return _mm512_setzero_si512(); }
    static Sums add(Sums sums, __m512i x, __m512i codes) {
#if defined(__AVX512VNNI__)
        return _mm512_dpwssd_epi32(sums, x, codes);
#else
        sums = _mm512_add_epi32(sums, _mm512_madd_epi16(x, codes));
#if !defined(ARBOR_EMULATED)
        asm("" : "+v"(sums));  // in this order, as in block_words.h
#endif
        return sums;
#endif
    }
    // The unit is a power of two, or NaN if a number is not finite.
    static float read(const bf16* from, Number* to) {
        __m512 numbers = load(from).v, sizes = _mm512_abs_ps(numbers);
        __mmask16 finite = _mm512_cmp_ps_mask(sizes, _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
        float greatest = _mm512_mask_reduce_max_ps(finite, sizes);
        int32_t bits;
        std::memcpy(&bits, &greatest, 4);
        int exponent = finite && bits >> 23 > 30 ? bits >> 23 : 30;  // smaller ones than 2^-111 are zeros
        __m512 times = _mm512_set1_ps(power(254 + 14 - exponent));
        __m512i whole = _mm512_maskz_cvtps_epi32(finite, _mm512_mul_ps(numbers, times));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtsepi32_epi16(whole));
        return finite == 0xffff ? power(exponent - 14) : NAN;
    }

    static __m512 scaled(Sums sums, __m512 scale, const char* x, __m512 total) {
        __m512 unit = _mm512_loadu_ps(x + 576);
        return _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sums), scale), unit, total);
    }
};

#endif

template <class F>
constexpr bool NIBBLES = F::NUMBERS == RUN && F::LEVELS <= 32;  // in halves of a run

// What up to 64 codes stand for.
template <class F>
struct Levels {
    alignas(64) CodePairs::Number values[64];
    constexpr Levels() : values() {
        for (int i = 0; i < 64; i++) {
            if constexpr (std::is_same_v<F, IQ4_NL>) values[i] = CodePairs::number(F::VALUES[i % 16]);
            else values[i] = CodePairs::number(i % F::LEVELS + F::FIRST);
        }
    }
};

// 32 codes, each the low byte of a word, as `CodePairs` has them; the high bytes are left out.
template <class F>
inline __m512i levels_of(__m512i words) {
    static constexpr Levels<F> LEVELS{};
    __m512i low = _mm512_load_si512(LEVELS.values);
    if constexpr (F::LEVELS == 64) {
        return _mm512_permutex2var_epi16(low, words, _mm512_load_si512(LEVELS.values + 32));
    }
    return _mm512_permutexvar_epi16(words, low);
}

// Words of 32 bytes twice: shifted to the left by so many bits, and by others (below 0: to the right).
template <int FIRST, int SECOND>
inline __m512i twice(const uint8_t* bytes) {
    auto from = reinterpret_cast<const __m256i*>(bytes);
    __m512i both = _mm512_broadcast_i64x4(_mm256_loadu_si256(from));
    constexpr int LEFT = FIRST < 0 || SECOND < 0 ? 0 : 1;
    __m256i first = _mm256_set1_epi16(LEFT ? FIRST : -FIRST);
    __m512i shifts = _mm512_inserti64x4(_mm512_castsi256_si512(first),
                                        _mm256_set1_epi16(LEFT ? SECOND : -SECOND), 1);
    return LEFT ? _mm512_sllv_epi16(both, shifts) : _mm512_srlv_epi16(both, shifts);
}

// Some bits of bytes, added to codes that do not have them.
template <int BITS>
inline __m512i with_bits(__m512i codes, __m512i bytes) {
    return _mm512_ternarylogic_epi32(codes, bytes, _mm512_set1_epi8(BITS), 0xf8);  // a | (b & c)
}

// The codes of two runs.
template <class F, int R>
inline __m512i two_runs(const uint8_t* block) {
    if constexpr (std::is_same_v<F, Q2_K> || std::is_same_v<F, Q3_K>) {
        constexpr int BYTE = F::OFFSETS ? 16 : 32, BIT = R % 4 * 2;
        __m512i codes = twice<-BIT, -BIT - 2>(block + BYTE + R / 4 * 32);
        codes = _mm512_and_si512(codes, _mm512_set1_epi8(3));
        if constexpr (std::is_same_v<F, Q2_K>) return codes;
        else if constexpr (R == 0) return with_bits<4>(codes, twice<2, 1>(block));
        else return with_bits<4>(codes, twice<2 - R, 1 - R>(block));
    } else if constexpr (std::is_same_v<F, Q4_K> || std::is_same_v<F, Q5_K>) {
        __m512i codes = twice<0, -4>(block + F::BYTES - 128 + R / 2 * 32);
        codes = _mm512_and_si512(codes, _mm512_set1_epi8(15));
        if constexpr (std::is_same_v<F, Q4_K>) return codes;
        else return with_bits<16>(codes, twice<4 - R, 3 - R>(block + 16));
    } else {
        static_assert(std::is_same_v<F, Q6_K>);
        __m512i codes = _mm512_loadu_si512(block + R / 4 * 64);
        if (R % 4) codes = _mm512_srli_epi16(codes, 4);
        codes = _mm512_and_si512(codes, _mm512_set1_epi8(15));
        if constexpr (R % 4) return with_bits<48>(codes, twice<0, -2>(block + 128 + R / 4 * 32));
        else return with_bits<48>(codes, twice<4, 2>(block + 128 + R / 4 * 32));
    }
}

// The first eight bytes of eight blocks of 32, or fewer and zeros.
template <class F>
inline __m512i headers_of(const uint8_t* blocks, int count) {
    auto at = [&](int run) {
        int64_t bits = 0;
        if (run < count) std::memcpy(&bits, blocks + run * F::BYTES, 8);
        return bits;
    };
    return _mm512_set_epi64(at(7), at(6), at(5), at(4), at(3), at(2), at(1), at(0));
}

// A word of each header.
template <int PLACE>
inline __m128i words_of(__m512i headers) {
    return _mm512_cvtepi64_epi16(_mm512_srli_epi64(headers, 16 * PLACE));
}

// The codes of these blocks. Nibbles come in halves: the first and the second 16 of four runs, then of
// the others.
template <class F>
inline void small_codes(const uint8_t* blocks, int count, __m512i headers, __m512i* z) {
    if constexpr (NIBBLES<F>) {
        auto part = [&](int run) {
            auto from = reinterpret_cast<const __m128i*>(blocks + run * F::BYTES + F::BYTES - 16);
            return run < count ? _mm_loadu_si128(from) : _mm_setzero_si128();
        };
        for (int half = 0; half < 2; half++) {
            __m512i four = _mm512_castsi128_si512(part(4 * half));
            four = _mm512_inserti32x4(four, part(4 * half + 1), 1);
            four = _mm512_inserti32x4(four, part(4 * half + 2), 2);
            four = _mm512_inserti32x4(four, part(4 * half + 3), 3);
            z[2 * half] = _mm512_and_si512(four, _mm512_set1_epi8(15));
            z[2 * half + 1] = _mm512_and_si512(_mm512_srli_epi16(four, 4), _mm512_set1_epi8(15));
        }
        if constexpr (F::LEVELS == 32) {  // a fifth bit each
            __m128i low = words_of<F::OFFSETS ? 2 : 1>(headers);
            __m128i high = words_of<F::OFFSETS ? 3 : 2>(headers);
            const int64_t masks[4] = {_mm_cvtsi128_si64(low), _mm_cvtsi128_si64(high),
                                      _mm_extract_epi64(low, 1), _mm_extract_epi64(high, 1)};
            for (int i = 0; i < 4; i++) {
                z[i] = _mm512_or_si512(z[i], _mm512_maskz_set1_epi8(masks[i], 16));
            }
        }
    } else {
        auto part = [&](int run) {
            auto from = reinterpret_cast<const __m256i*>(blocks + run * F::BYTES + F::BYTES - 32);
            return run < count ? _mm256_loadu_si256(from) : _mm256_setzero_si256();
        };
        for (int i = 0; i < 4; i++) {
            z[i] = _mm512_inserti64x4(_mm512_castsi256_si512(part(2 * i)), part(2 * i + 1), 1);
        }
    }
}

// The group whose sum a lane holds.
template <class F>
constexpr int group_of(int lane) {
    int part = lane % 4, place = lane / 4;
    if constexpr (NIBBLES<F>) return 2 * (place + 4 * (part / 2)) + part % 2;
    return 4 * part + place;
}

// Four vectors of 16 bytes of four groups become four whose lane 4 m + k has four bytes of part m of
// vector k.
inline void group_lanes(const __m512i* z, __m512i* to) {
    __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpackhi_epi32(z[0], z[1]);
    __m512i c = _mm512_unpacklo_epi32(z[2], z[3]), d = _mm512_unpackhi_epi32(z[2], z[3]);
    to[0] = _mm512_unpacklo_epi64(a, c);
    to[1] = _mm512_unpackhi_epi64(a, c);
    to[2] = _mm512_unpacklo_epi64(b, d);
    to[3] = _mm512_unpackhi_epi64(b, d);
}

// A number for each group, or for each run of two groups, in the order of the lanes.
template <class F>
inline __m512 in_lanes(__m512 numbers) {
    alignas(64) static constexpr auto ORDER = [] {
        struct {
            int32_t places[16];
        } found{};
        for (int lane = 0; lane < 16; lane++) found.places[lane] = group_of<F>(lane) / (F::HALVES ? 1 : 2);
        return found;
    }();
    return _mm512_permutexvar_ps(_mm512_load_si512(ORDER.places), numbers);
}

// 16 groups of 16 numbers, of lane l after that of lane l - 8, become eight steps of pairs whose lanes
// are the groups. Numbers are paired as codes are: bytes 0 and 2 of four meet the first of two steps,
// bytes 1 and 3 the second.
inline void group_steps(const CodePairs::Number* groups, __m512i* steps) {
    const __m512i pairs = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    __m512i two[8], four[8];
    WRITTEN_OUT
    for (int i = 0; i < 8; i += 2) {
        __m512i first = _mm512_shuffle_epi8(_mm512_load_si512(groups + 32 * i), pairs);
        __m512i second = _mm512_shuffle_epi8(_mm512_load_si512(groups + 32 * i + 32), pairs);
        two[i] = _mm512_unpacklo_epi32(first, second);
        two[i + 1] = _mm512_unpackhi_epi32(first, second);
    }
    WRITTEN_OUT
    for (int i = 0; i < 8; i += 4) {
        four[i] = _mm512_unpacklo_epi64(two[i], two[i + 2]);
        four[i + 1] = _mm512_unpackhi_epi64(two[i], two[i + 2]);
        four[i + 2] = _mm512_unpacklo_epi64(two[i + 1], two[i + 3]);
        four[i + 3] = _mm512_unpackhi_epi64(two[i + 1], two[i + 3]);
    }
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
    const __m512i high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    WRITTEN_OUT
    for (int i = 0; i < 4; i++) {
        steps[i] = _mm512_permutex2var_epi64(four[i], low, four[i + 4]);
        steps[i + 4] = _mm512_permutex2var_epi64(four[i], high, four[i + 4]);
    }
}

// Scales and offsets of Q4_K and Q5_K (`six_bits`) for the eight runs: first scales, then offsets.
inline __m512 six_factors(const uint8_t* block) {
    // a number's low bits and its two high ones lie in one byte, or in two
    const __m512i low_at = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 15, 14, 13, 12, 7, 6, 5, 4);
    const __m512i high_at = _mm512_set_epi32(11, 10, 9, 8, -1, -1, -1, -1, 7, 6, 5, 4, -1, -1, -1, -1);
    const __m512i rest = _mm512_set1_epi32(static_cast<int>(0x80808000));  // of a lane: zeros
    const __m512i shifts = _mm512_set_epi32(4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i kept = _mm512_set_epi32(15, 15, 15, 15, 63, 63, 63, 63, 15, 15, 15, 15, 63, 63, 63, 63);
    __m128i header = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block));
    __m512i bytes = _mm512_broadcast_i32x4(header);
    __m512i low = _mm512_shuffle_epi8(bytes, _mm512_or_si512(low_at, rest));
    __m512i high = _mm512_shuffle_epi8(bytes, _mm512_or_si512(high_at, rest));
    low = _mm512_and_si512(_mm512_srlv_epi32(low, shifts), kept);
    low = _mm512_ternarylogic_epi32(low, _mm512_srli_epi32(high, 2), _mm512_set1_epi32(48), 0xf8);
    const __m512i which = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    __m512 factors = _mm512_permutexvar_ps(which, _mm512_castps128_ps512(_mm_cvtph_ps(header)));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(low), factors);
}

template <class F>
struct CodeLanes {
    using Format = F;
    static constexpr int ROWS = 6;
    // of a block: numbers, sums of groups and their units
    static constexpr int X_BYTES = 512 + (CodePairs::WHOLE ? 128 : 64);
    static constexpr int WEIGHT_BYTES = 512 + 2 * 64;    // numbers, scales, offsets
    static constexpr int BYTES = BLOCK_WEIGHTS / F::NUMBERS * F::BYTES;

    static int64_t x_bytes(int inputs) { return weight_blocks(inputs) * X_BYTES; }
    static constexpr int64_t WEIGHT_ROW = weight_blocks(MOST_DECODED) * WEIGHT_BYTES;

    // Numbers of x in the order in which codes meet them; zeros behind the last.
    static void read_x(const bf16* x, int inputs, char* to) {
        for (int first = 0; first < inputs; first += BLOCK_WEIGHTS, to += X_BYTES) {
            alignas(64) bf16 block[BLOCK_WEIGHTS];
            alignas(64) CodePairs::Number groups[BLOCK_WEIGHTS];
            alignas(64) float units[16];
            int here = inputs - first < BLOCK_WEIGHTS ? inputs - first : BLOCK_WEIGHTS;
            std::memcpy(block, x + first, here * sizeof(bf16));
            std::memset(block + here, 0, (BLOCK_WEIGHTS - here) * sizeof(bf16));
            for (int lane = 0; lane < 16; lane++) {
                CodePairs::Number* place = groups + 16 * (lane % 8 * 2 + lane / 8);
                units[lane] = CodePairs::read(block + 16 * group_of<F>(lane), place);
            }
            __m512i steps[8];
            group_steps(groups, steps);
            __m512 sum = _mm512_setzero_ps();
            WRITTEN_OUT
            for (int step = 0; step < 8; step++) {
                _mm512_storeu_si512(to + step * 64, steps[step]);
                sum = _mm512_add_ps(sum, CodePairs::sums_of_pairs(steps[step]));
            }
            if (CodePairs::WHOLE) {
                sum = _mm512_mul_ps(sum, _mm512_load_ps(units));
                _mm512_storeu_ps(to + 576, _mm512_load_ps(units));
            }
            _mm512_storeu_ps(to + 512, sum);
        }
    }

    static void decode(const uint8_t* row, int64_t ahead, int first, int inputs, char* to) {
        row += row_bytes<F>(first);
        for (int at = 0; at < inputs; at += BLOCK_WEIGHTS, to += WEIGHT_BYTES) {
            auto keep = [&](int step, __m512i numbers) { _mm512_storeu_si512(to + step * 64, numbers); };
            fetch(row + ahead, BYTES);
            auto [scale, offset] = decoded(row, inputs - at, keep);
            _mm512_storeu_ps(to + 512, scale);
            if (F::OFFSETS) _mm512_storeu_ps(to + 576, offset);
            row += BYTES;
        }
    }

    struct Factors {
        __m512 scale, offset;  // of the lanes
    };

    // Codes and factors of eight blocks of 32, or of fewer.
    template <int WHOLE>
    static void small(const uint8_t* blocks, int given, __m512i* z, Factors* to) {
        int count = WHOLE ? WHOLE : given;
        __m512i headers = headers_of<F>(blocks, count);
        small_codes<F>(blocks, count, headers, z);
        auto factors = [](__m128i halves) {
            return in_lanes<F>(_mm512_castps256_ps512(_mm256_cvtph_ps(halves)));
        };
        to->scale = factors(words_of<0>(headers));
        if (F::OFFSETS) to->offset = _mm512_sub_ps(_mm512_setzero_ps(), factors(words_of<1>(headers)));
    }

    // Calls `visit(step, 32 numbers)` for the eight steps of a block.
    template <class Visit>
    static Factors visited(const __m512i* lanes, Factors found, Visit visit) {
        WRITTEN_OUT
        for (int j = 0; j < 4; j++) {
            if constexpr (CodePairs::WHOLE && !std::is_same_v<F, IQ4_NL>) {
                __m512i even = _mm512_slli_epi16(lanes[j], 8), odd = lanes[j];
                const __m512i first = _mm512_set1_epi16(F::LEVELS == 256 ? 0 : F::FIRST);
                if constexpr (F::LEVELS == 256) {  // signed bytes
                    even = _mm512_srai_epi16(even, 8), odd = _mm512_srai_epi16(odd, 8);
                } else {
                    even = _mm512_and_si512(lanes[j], _mm512_set1_epi16(255)), odd = _mm512_srli_epi16(odd, 8);
                }
                visit(2 * j, F::FIRST ? _mm512_add_epi16(even, first) : even);
                visit(2 * j + 1, F::FIRST ? _mm512_add_epi16(odd, first) : odd);
            } else if constexpr (F::LEVELS == 256) {  // signed bytes
                auto bfloat16s = [&](int left) {
                    __m512i whole = _mm512_srai_epi32(_mm512_slli_epi32(lanes[j], left), 24);
                    return _mm512_castps_si512(_mm512_cvtepi32_ps(whole));
                };
                __m512i second = _mm512_srli_epi32(bfloat16s(24), 16);
                visit(2 * j, _mm512_mask_blend_epi16(0xaaaaaaaa, second, bfloat16s(8)));
                second = _mm512_srli_epi32(bfloat16s(16), 16);
                visit(2 * j + 1, _mm512_mask_blend_epi16(0xaaaaaaaa, second, bfloat16s(0)));
            } else {
                visit(2 * j, levels_of<F>(lanes[j]));
                visit(2 * j + 1, levels_of<F>(_mm512_srli_epi16(lanes[j], 8)));
            }
        }
        return found;
    }

    // The same, from a block.
    template <class Visit>
    static Factors decoded(const uint8_t* block, int inputs, Visit visit) {
        __m512i z[4], lanes[4];
        Factors found{_mm512_setzero_ps(), _mm512_setzero_ps()};
        if constexpr (F::NUMBERS == RUN) {
            bool whole = inputs >= BLOCK_WEIGHTS;  // written out apart
            if (whole) small<8>(block, 8, z, &found);
            else small<0>(block, inputs / RUN, z, &found);
        } else {
            z[0] = two_runs<F, 0>(block);
            z[1] = two_runs<F, 2>(block);
            z[2] = two_runs<F, 4>(block);
            z[3] = two_runs<F, 6>(block);
            if constexpr (F::HALVES) {
                Scales scales;
                F::prepare(block, scales);
                found.scale = in_lanes<F>(_mm512_load_ps(scales.scale));
                if (F::OFFSETS) found.offset = in_lanes<F>(_mm512_load_ps(scales.offset));
            } else {
                __m512 both = six_factors(block);
                found.scale = in_lanes<F>(both);
                found.offset = in_lanes<F>(_mm512_shuffle_f32x4(both, both, 0xee));
            }
        }
        group_lanes(z, lanes);
        return visited(lanes, found, visit);
    }

    static constexpr int FUSED_ROWS = 8;

    // R rows of x by one output whose weights are never stored: the sums of `tile`.
    template <int R>
    static void fused(const char* x, int64_t x_row, const uint8_t* row, int64_t ahead, int inputs,
                      bool begins, float* sums) {
        __m512 total[R];
        WRITTEN_OUT
        for (int r = 0; r < R; r++) {
            total[r] = begins ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * SUMS_ROW);
        }
        for (int at = 0; at < inputs; at += BLOCK_WEIGHTS, x += X_BYTES) {
            CodePairs::Sums acc[R];
            WRITTEN_OUT
            for (int r = 0; r < R; r++) acc[r] = CodePairs::none();
            auto add = [&](int step, __m512i numbers) {
                WRITTEN_OUT
                for (int r = 0; r < R; r++) {
                    acc[r] = CodePairs::add(acc[r], _mm512_loadu_si512(x + r * x_row + step * 64), numbers);
                }
            };
            fetch(row + ahead, BYTES);
            auto [scale, offset] = decoded(row, inputs - at, add);
            WRITTEN_OUT
            for (int r = 0; r < R; r++) {
                total[r] = CodePairs::scaled(acc[r], scale, x + r * x_row, total[r]);
                if (F::OFFSETS) {
                    __m512 sum = _mm512_loadu_ps(x + r * x_row + 512);
                    total[r] = _mm512_fnmadd_ps(offset, sum, total[r]);
                }
            }
            row += BYTES;
        }
        WRITTEN_OUT
        for (int r = 0; r < R; r++) _mm512_storeu_ps(sums + r * SUMS_ROW, total[r]);
    }

    // As `PlainLanes::tile`; the sums stay in the L1 cache.
    template <int R>
    static void tile(const char* x, int64_t x_row, const char* weights, int inputs, bool begins,
                     float* sums) {
        if (begins) {
            for (int r = 0; r < R; r++) {
                for (int p = 0; p < 4; p++) _mm512_storeu_ps(sums + r * SUMS_ROW + p * 16, _mm512_setzero_ps());
            }
        }
        for (int at = 0; at < inputs; at += BLOCK_WEIGHTS, x += X_BYTES, weights += WEIGHT_BYTES) {
            CodePairs::Sums acc[R][4];
            for (int r = 0; r < R; r++) {
                for (int p = 0; p < 4; p++) acc[r][p] = CodePairs::none();
            }
            WRITTEN_OUT
            for (int step = 0; step < 8; step++) {
                __m512i weight[4];
                for (int p = 0; p < 4; p++) weight[p] = _mm512_loadu_si512(weights + p * WEIGHT_ROW + step * 64);
                for (int r = 0; r < R; r++) {
                    __m512i factor = _mm512_loadu_si512(x + r * x_row + step * 64);
                    for (int p = 0; p < 4; p++) acc[r][p] = CodePairs::add(acc[r][p], factor, weight[p]);
                }
            }
            for (int p = 0; p < 4; p++) {
                __m512 scale = _mm512_loadu_ps(weights + p * WEIGHT_ROW + 512), offset;
                if (F::OFFSETS) offset = _mm512_loadu_ps(weights + p * WEIGHT_ROW + 576);
                for (int r = 0; r < R; r++) {
                    float* sum = sums + r * SUMS_ROW + p * 16;
                    __m512 found = CodePairs::scaled(acc[r][p], scale, x + r * x_row, _mm512_loadu_ps(sum));
                    if (F::OFFSETS) found = _mm512_fnmadd_ps(offset, _mm512_loadu_ps(x + r * x_row + 512), found);
                    _mm512_storeu_ps(sum, found);
                    asm("" ::: "memory");  // not in registers, which the products need
                }
            }
        }
    }
};

}  // namespace

#endif
