// Codes of blocks as pairs of 16-bit whole numbers, for x in bfloat16 and CPUs without AVX-512.
//
// As block_pairs.h, by halves of a block: eight groups of 16 weights, a lane each. Numbers of x are
// whole in a unit of their group: exact but for those below 1/128 of the largest of their group,
// which are rounded to 2^-15 of it.
#pragma once

#include "block_singles.h"

#if defined(__x86_64__) && !defined(__AVX512F__)

namespace {

template <class F>
struct WordLanes {
    using Format = F;
    using Singles = SingleLanes<F>;
    static constexpr bool NIBBLES = F::NUMBERS == RUN && F::LEVELS <= 32;  // in halves of a run
    static constexpr bool SIGNED = F::LEVELS == 256 || std::is_same_v<F, IQ4_NL>;
    static constexpr bool SHIFTED = !SIGNED && F::FIRST != 0;  // x has the sums of what codes lack
    static_assert(!(SHIFTED && F::OFFSETS));
    static constexpr int ROWS = 2, FUSED_ROWS = 8, HALF = 256;  // bytes of numbers of a half
    static constexpr int X_BYTES = 512 + 2 * 64;                // and sums of groups or runs, units
    static constexpr int WEIGHT_BYTES = 512 + 2 * 64;           // and scales and offsets

    // Whether offsets are met with a half: those of its groups, or with the first half those of runs.
    static constexpr bool offsets_with(int half) { return F::OFFSETS && (F::HALVES || half == 0); }

    // The group whose sum a lane holds, of the eight of a half.
    static constexpr int group_in_half(int lane) {
        int part = lane % 4, place = lane / 4;
        return NIBBLES ? 2 * (place + part / 2 * 2) + part % 2 : 2 * part + place;
    }

    static int64_t x_bytes(int inputs) { return weight_blocks(inputs) * X_BYTES; }
    static constexpr int64_t WEIGHT_ROW = weight_blocks(MOST_DECODED) * WEIGHT_BYTES;

    // Numbers of x in the order in which codes meet them; zeros behind the last.
    static void read_x(const bf16* x, int inputs, char* to) {
        for (int first = 0; first < inputs; first += BLOCK_WEIGHTS, to += X_BYTES) {
            bf16 whole[BLOCK_WEIGHTS];
            const bf16* block = x + first;
            if (inputs - first < BLOCK_WEIGHTS) {
                size_t bytes = static_cast<size_t>(inputs - first) * sizeof(bf16);
                std::memset(whole, 0, sizeof whole);
                std::memcpy(whole, block, bytes);
                block = whole;
            }
            Vec of_groups[2];
            for (int h = 0; h < 2; h++) {
                float* sums = reinterpret_cast<float*>(to + 2 * HALF) + 8 * h;
                __m256i steps[8], total = _mm256_setzero_si256();
                WRITTEN_OUT
                for (int lane = 0; lane < 8; lane++) {
                    steps[lane] = whole_numbers(block + 16 * (8 * h + group_in_half(lane)), sums + 16 + lane);
                }
                eight_by_eight(steps);
                WRITTEN_OUT
                for (int step = 0; step < 8; step++) {
                    auto place = reinterpret_cast<__m256i*>(to + h * HALF + step * 32);
                    _mm256_storeu_si256(place, steps[step]);
                    total = _mm256_add_epi32(total, _mm256_madd_epi16(steps[step], _mm256_set1_epi16(1)));
                }
                if (SHIFTED) {
                    total = _mm256_mullo_epi32(total, _mm256_set1_epi32(F::FIRST));
                    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums), total);
                } else {
                    of_groups[h] = Vec{_mm256_cvtepi32_ps(total)} * load(sums + 16);
                    if (F::HALVES) store(sums, of_groups[h]);
                }
            }
            if (F::OFFSETS && !F::HALVES) {
                store(reinterpret_cast<float*>(to + 2 * HALF), sums_of_runs(of_groups[0], of_groups[1]));
            }
        }
    }

    // 16 numbers in a unit that is a power of two, NaN if one is not finite. They are paired as codes
    // are: bytes 0 and 2 of four meet the first of two steps, bytes 1 and 3 the second.
    INLINED static __m256i whole_numbers(const bf16* from, float* unit) {
        __m256i given = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        __m256i others = _mm256_xor_si256(given, _mm256_set1_epi16(0x7fff));  // the largest becomes the least
        others = _mm256_and_si256(others, _mm256_set1_epi16(0x7fff));
        __m128i least = _mm_min_epu16(_mm256_castsi256_si128(others), _mm256_extracti128_si256(others, 1));
        int exponent = (0x7fff - _mm_extract_epi16(_mm_minpos_epu16(least), 0)) >> 7;
        if (exponent == 255) {
            *unit = NAN;
            return _mm256_setzero_si256();
        }
        exponent = exponent > 30 ? exponent : 30;  // smaller ones than 2^-111 are zeros
        *unit = power(exponent - 14);
        Vec times = set1(power(254 + 14 - exponent));
        __m256i low = _mm256_cvtps_epi32((load(from) * times).v);
        __m256i high = _mm256_cvtps_epi32((load(from + 8) * times).v);
        __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
        const __m256i pairs = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4,
                                               5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
        return _mm256_shuffle_epi8(both, pairs);
    }

    // Sums of the runs of a block from those of its groups.
    INLINED static Vec sums_of_runs(Vec first, Vec second) {
        if (NIBBLES) return {_mm256_hadd_ps(first.v, second.v)};
        return {_mm256_add_ps(_mm256_permute2f128_ps(first.v, second.v, 0x20),
                              _mm256_permute2f128_ps(first.v, second.v, 0x31))};
    }

    // Eight vectors of 8 numbers of 32 bits become those of their places.
    INLINED static void eight_by_eight(__m256i* rows) {
        __m256i two[8], four[8];
        WRITTEN_OUT
        for (int i = 0; i < 8; i += 2) {
            two[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
            two[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
        }
        WRITTEN_OUT
        for (int i = 0; i < 8; i += 4) {
            four[i] = _mm256_unpacklo_epi64(two[i], two[i + 2]);
            four[i + 1] = _mm256_unpackhi_epi64(two[i], two[i + 2]);
            four[i + 2] = _mm256_unpacklo_epi64(two[i + 1], two[i + 3]);
            four[i + 3] = _mm256_unpackhi_epi64(two[i + 1], two[i + 3]);
        }
        WRITTEN_OUT
        for (int i = 0; i < 4; i++) {
            rows[i] = _mm256_permute2x128_si256(four[i], four[i + 4], 0x20);
            rows[i + 4] = _mm256_permute2x128_si256(four[i], four[i + 4], 0x31);
        }
    }

    template <int R>
    INLINED static __m256i run(const uint8_t* block) {
        Codes codes = F::NUMBERS == RUN ? F::template codes<0>(block + R * F::BYTES)
                                        : F::template codes<R % (F::NUMBERS / RUN)>(block);
        return reinterpret_cast<__m256i>(codes);
    }

    // The first halves of two runs of nibbles, and the second ones.
    INLINED static void two_runs(const uint8_t* block, __m256i* to) {
        const uint8_t* codes = block + F::BYTES - 16;
        __m256i both = _mm256_inserti128_si256(
            _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))),
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + F::BYTES)), 1);
        to[0] = _mm256_and_si256(both, _mm256_set1_epi8(15));
        to[1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), _mm256_set1_epi8(15));
        if constexpr (std::is_same_v<F, IQ4_NL>) {
            auto values = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(F::VALUES)));
            to[0] = _mm256_shuffle_epi8(values, to[0]);
            to[1] = _mm256_shuffle_epi8(values, to[1]);
        }
    }

    // Scales of the groups of the two halves, in the order of the lanes, and their offsets; or those of
    // the block's runs, in the order of `sums_of_runs`.
    struct Factors {
        Vec scale[2], offset[2];
        __m256i head[2];  // of small blocks
    };

    // Adds the fifth bits of four runs of nibbles, in the order of the lanes.
    INLINED static void add_fifth_bits(__m256i head, __m256i* to) {
        constexpr int PLACE = F::BYTES - 20;  // of a run's bits in its head
        const __m128i two_bytes = _mm_set_epi32(0x0a0a0a0a, 0x08080808, 0x02020202, 0x00000000);
        const __m256i bits = _mm256_set1_epi32(static_cast<int>(0x80402010)), sixteen = _mm256_set1_epi8(16);
        WRITTEN_OUT
        for (int j = 0; j < 4; j += 2) {
            __m128i places = _mm_add_epi8(two_bytes, _mm_set1_epi8(static_cast<char>(PLACE + j / 2)));
            __m256i eight = _mm256_shuffle_epi8(head, _mm256_broadcastsi128_si256(places));
            __m256i first = _mm256_and_si256(_mm256_slli_epi16(eight, 4), bits);
            __m256i second = _mm256_and_si256(eight, bits);
            to[j] = _mm256_or_si256(to[j], _mm256_min_epu8(first, sixteen));
            to[j + 1] = _mm256_or_si256(to[j + 1], _mm256_min_epu8(second, sixteen));
        }
    }

    // Calls `visit(step, 16 codes)` for the eight steps of a half.
    template <int H, class Visit>
    INLINED static void half(const uint8_t* block, const Factors& given, Visit visit) {
        __m256i z[4];
        if constexpr (NIBBLES) {
            two_runs(block + 4 * H * F::BYTES, z);
            two_runs(block + (4 * H + 2) * F::BYTES, z + 2);
        } else {
            z[0] = run<4 * H>(block), z[1] = run<4 * H + 1>(block);
            z[2] = run<4 * H + 2>(block), z[3] = run<4 * H + 3>(block);
        }
        __m256i a = _mm256_unpacklo_epi32(z[0], z[1]), b = _mm256_unpackhi_epi32(z[0], z[1]);
        __m256i c = _mm256_unpacklo_epi32(z[2], z[3]), d = _mm256_unpackhi_epi32(z[2], z[3]);
        __m256i lanes[4] = {_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c),
                            _mm256_unpacklo_epi64(b, d), _mm256_unpackhi_epi64(b, d)};
        if constexpr (NIBBLES && F::LEVELS == 32) add_fifth_bits(given.head[H], lanes);
        WRITTEN_OUT
        for (int j = 0; j < 4; j++) {
            if (SIGNED) {
                visit(2 * j, _mm256_srai_epi16(_mm256_slli_epi16(lanes[j], 8), 8));
                visit(2 * j + 1, _mm256_srai_epi16(lanes[j], 8));
            } else {
                visit(2 * j, _mm256_and_si256(lanes[j], _mm256_set1_epi16(255)));
                visit(2 * j + 1, _mm256_srli_epi16(lanes[j], 8));
            }
        }
    }

    INLINED static Factors factors(const uint8_t* block, int left) {
        Factors found;
        if constexpr (F::HALVES) {
            Scales scales;
            F::prepare(block, scales);
            const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
            for (int h = 0; h < 2; h++) {
                found.scale[h] = {_mm256_permutevar8x32_ps(_mm256_load_ps(scales.scale + 8 * h), order)};
                if (!F::OFFSETS) continue;
                found.offset[h] = {_mm256_permutevar8x32_ps(_mm256_load_ps(scales.offset + 8 * h), order)};
            }
        } else {
            __m256 scales, offsets;
            Singles::template of_runs<NIBBLES>(block, found.head, scales, offsets);
            if (F::NUMBERS == RUN && left < BLOCK_WEIGHTS) {  // zeros behind the last run
                const __m256i runs = NIBBLES ? _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7)
                                             : _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                __m256 mask = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(left / RUN), runs));
                scales = _mm256_and_ps(scales, mask);
                offsets = _mm256_and_ps(offsets, mask);
            }
            if (NIBBLES) {
                found.scale[0] = {_mm256_permute_ps(scales, 0x50)};
                found.scale[1] = {_mm256_permute_ps(scales, 0xfa)};
            } else {
                found.scale[0] = {_mm256_permute2f128_ps(scales, scales, 0x00)};
                found.scale[1] = {_mm256_permute2f128_ps(scales, scales, 0x11)};
            }
            found.offset[0] = {offsets};
        }
        return found;
    }

    static void decode(const uint8_t* row, int64_t ahead, int first, int inputs, char* to) {
        row += row_bytes<F>(first);
        each_block<F, true>(row, ahead, inputs, [&](const uint8_t* block, int left) INLINED {
            const Factors given = factors(block, left);
            halves(left, [&](auto h) INLINED {
                half<h>(block, given, [&](int step, __m256i codes) INLINED {
                    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + h * HALF + step * 32), codes);
                });
                float* kept = reinterpret_cast<float*>(to + 2 * HALF) + 8 * h;
                store(kept, given.scale[h]);
                if (offsets_with(h)) store(kept + 16, given.offset[h]);
            });
            to += WEIGHT_BYTES;
        });
    }

    // Calls `visit` for the halves of a block of which inputs are left.
    template <class Visit>
    INLINED static void halves(int left, Visit visit) {
        visit(std::integral_constant<int, 0>{});
        if (left > BLOCK_WEIGHTS / 2) visit(std::integral_constant<int, 1>{});
    }

    // The sums of a half of `x` before any product.
    INLINED static __m256i none(const char* x) {
        return SHIFTED ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)) : _mm256_setzero_si256();
    }

    // Sums of the groups of a half, scaled and added to a total less offsets; `x` has sums and units.
    INLINED static Vec scaled(__m256i sums, Vec scale, Vec offset, bool offsets, const float* x, Vec total) {
        total = fma(Vec{_mm256_cvtepi32_ps(sums)} * scale, load(x + 16), total);
        return offsets ? Vec{_mm256_fnmadd_ps(offset.v, load(x).v, total.v)} : total;
    }

    INLINED static __m256i add(__m256i sums, const char* x, __m256i numbers) {
        __m256i factor = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
#if defined(__AVXVNNI__)
        return _mm256_dpwssd_avx_epi32(sums, factor, numbers);
#else
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(factor, numbers));
        asm("" : "+x"(sums));  // in this order: else all products wait in memory for their sum
        return sums;
#endif
    }

    // R rows of x by one output whose weights are never stored: the sums of `tile`.
    template <int R>
    static void fused(const char* x, int64_t x_row, const uint8_t* row, int64_t ahead, int inputs,
                      bool begins, float* sums) {
        Vec total[R];
        WRITTEN_OUT
        for (int r = 0; r < R; r++) total[r] = begins ? set1(0.0f) : load(sums + r * SUMS_ROW);
        each_block<F, true>(row, ahead, inputs, [&](const uint8_t* block, int left) INLINED {
            const Factors given = factors(block, left);
            halves(left, [&](auto h) INLINED {
                __m256i acc[R];
                WRITTEN_OUT
                for (int r = 0; r < R; r++) acc[r] = none(x + r * x_row + 2 * HALF + 32 * h);
                half<h>(block, given, [&](int step, __m256i codes) INLINED {
                    WRITTEN_OUT
                    for (int r = 0; r < R; r++) {
                        acc[r] = add(acc[r], x + r * x_row + h * HALF + step * 32, codes);
                    }
                });
                WRITTEN_OUT
                for (int r = 0; r < R; r++) {
                    const float* groups = reinterpret_cast<const float*>(x + r * x_row + 2 * HALF) + 8 * h;
                    total[r] = scaled(acc[r], given.scale[h], given.offset[h], offsets_with(h), groups, total[r]);
                }
            });
            x += X_BYTES;
        });
        WRITTEN_OUT
        for (int r = 0; r < R; r++) store(sums + r * SUMS_ROW, total[r]);
    }

    // As `PlainLanes::tile`; the sums stay in the L1 cache.
    template <int R>
    static void tile(const char* x, int64_t x_row, const char* weights, int inputs, bool begins,
                     float* sums) {
        if (begins) {
            for (int r = 0; r < R; r++) {
                for (int p = 0; p < 4; p++) store(sums + r * SUMS_ROW + p * 8, set1(0.0f));
            }
        }
        for (int at = 0; at < inputs; at += BLOCK_WEIGHTS, x += X_BYTES, weights += WEIGHT_BYTES) {
            for (int h = 0; h < (inputs - at > BLOCK_WEIGHTS / 2 ? 2 : 1); h++) {
                __m256i acc[R][4];
                WRITTEN_OUT
                for (int r = 0; r < R; r++) {
                    WRITTEN_OUT
                    for (int p = 0; p < 4; p++) acc[r][p] = none(x + r * x_row + 2 * HALF + 32 * h);
                }
                WRITTEN_OUT
                for (int step = 0; step < 8; step++) {
                    int place = h * HALF + step * 32;
                    WRITTEN_OUT
                    for (int p = 0; p < 4; p++) {
                        const char* from = weights + p * WEIGHT_ROW + place;
                        __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
                        asm("" : "+x"(numbers));  // once for all rows
                        WRITTEN_OUT
                        for (int r = 0; r < R; r++) acc[r][p] = add(acc[r][p], x + r * x_row + place, numbers);
                    }
                }
                WRITTEN_OUT
                for (int p = 0; p < 4; p++) {
                    const float* factors = reinterpret_cast<const float*>(weights + p * WEIGHT_ROW + 2 * HALF) + 8 * h;
                    Vec scale = load(factors), offset = scale;
                    if (offsets_with(h)) offset = load(factors + 16);
                    WRITTEN_OUT
                    for (int r = 0; r < R; r++) {
                        const float* groups = reinterpret_cast<const float*>(x + r * x_row + 2 * HALF) + 8 * h;
                        float* sum = sums + r * SUMS_ROW + p * 8;
                        store(sum, scaled(acc[r][p], scale, offset, offsets_with(h), groups, load(sum)));
                        asm("" ::: "memory");  // not in registers, which the products need
                    }
                }
            }
        }
    }
};

}  // namespace

#endif
