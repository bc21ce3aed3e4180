// Codes of blocks as pairs of 16-bit whole numbers, for x in bfloat16 and CPUs without AVX-512.
//
// As block_pairs.h, with eight groups of weights that share a scale, a lane each: the runs of a block,
// or the halves of four runs where these have scales of their own or a row ends with them. Numbers of
// x are whole in a unit of their group: exact but for those below 1/128 of the largest of their group,
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
    static constexpr int ROWS = 3, FUSED_ROWS = 8;
    static constexpr int GROUP = F::HALVES ? 16 : RUN;
    static constexpr int PARTS = BLOCK_WEIGHTS / (8 * GROUP), PART = 16 * GROUP;  // and bytes of numbers
    static constexpr int NUMBERS = 2 * BLOCK_WEIGHTS;          // bytes of a block's numbers
    static constexpr int X_BYTES = NUMBERS + PARTS * 64;       // and sums of groups, units
    static constexpr int WEIGHT_BYTES = NUMBERS + PARTS * 64;  // and offsets, scales

    // Whether as few weights are left of a row that each of its runs has two lanes.
    static constexpr bool few(int left) { return F::NUMBERS == RUN && left <= BLOCK_WEIGHTS / 2; }

    // The first weight of the group whose sum a lane holds, one of 16 or of 32.
    static constexpr int first_of(int group, int part, int lane) {
        return group == 16 ? 16 * (8 * part + 2 * (lane % 4) + lane / 4) : RUN * lane;
    }

    static int64_t x_bytes(int inputs) { return weight_blocks(inputs) * X_BYTES; }
    static constexpr int64_t WEIGHT_ROW = weight_blocks(MOST_DECODED) * WEIGHT_BYTES;

    // What a part's groups have in common, eight numbers: sums of x or offsets, and units or scales.
    template <class Char>
    INLINED static auto sums_at(Char* block, int part) {
        using Float = std::conditional_t<std::is_const_v<Char>, const float, float>;
        return reinterpret_cast<Float*>(block + NUMBERS + 32 * part);
    }
    template <class Char>
    INLINED static auto units_at(Char* block, int part) {
        return sums_at(block, PARTS + part);
    }

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
            int group = few(inputs - first) ? 16 : GROUP;
            for (int part = 0; part < PARTS; part++) {
                float *sums = sums_at(to, part), *units = units_at(to, part), times[8];
                for (int lane = 0; lane < 8; lane++) {
                    times[lane] = unit_of(block + first_of(group, part, lane), group, units + lane);
                }
                __m256i total = _mm256_setzero_si256();
                for (int i = 0; i < group; i += 16) {
                    __m256i steps[8];
                    WRITTEN_OUT
                    for (int lane = 0; lane < 8; lane++) {
                        steps[lane] = whole_numbers(block + first_of(group, part, lane) + i, times[lane]);
                    }
                    eight_by_eight(steps);
                    WRITTEN_OUT
                    for (int step = 0; step < 8; step++) {
                        auto place = reinterpret_cast<__m256i*>(to + part * PART + 16 * i + step * 32);
                        _mm256_storeu_si256(place, steps[step]);
                        total = _mm256_add_epi32(total, _mm256_madd_epi16(steps[step], _mm256_set1_epi16(1)));
                    }
                }
                if (SHIFTED) {
                    total = _mm256_mullo_epi32(total, _mm256_set1_epi32(F::FIRST));
                    _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums), total);
                } else {
                    store(sums, Vec{_mm256_cvtepi32_ps(total)} * load(units));
                }
            }
        }
    }

    // The unit of a group of x, a power of two, NaN if a number is not finite; what they are multiplied by.
    INLINED static float unit_of(const bf16* from, int group, float* unit) {
        __m128i least = _mm_set1_epi16(0x7fff);  // the largest becomes the least
        for (int i = 0; i < group; i += 8) {
            __m128i given = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
            __m128i magnitude = _mm_and_si128(given, _mm_set1_epi16(0x7fff));
            least = _mm_min_epu16(least, _mm_xor_si128(magnitude, _mm_set1_epi16(0x7fff)));
        }
        int exponent = (0x7fff - _mm_extract_epi16(_mm_minpos_epu16(least), 0)) >> 7;
        if (exponent == 255) {
            *unit = NAN;
            return 0.0f;
        }
        exponent = exponent > 30 ? exponent : 30;  // smaller ones than 2^-111 are zeros
        *unit = power(exponent - 14);
        return power(254 + 14 - exponent);
    }

    // 16 numbers, times 0 if one of their group is not finite. They are paired as codes are: bytes 0
    // and 2 of four meet the first of two steps, bytes 1 and 3 the second.
    INLINED static __m256i whole_numbers(const bf16* from, float factor) {
        if (factor == 0.0f) return _mm256_setzero_si256();
        Vec times = set1(factor);
        __m256i low = _mm256_cvtps_epi32((load(from) * times).v);
        __m256i high = _mm256_cvtps_epi32((load(from + 8) * times).v);
        __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
        const __m256i pairs = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4,
                                               5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
        return _mm256_shuffle_epi8(both, pairs);
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

    // What the codes of a run stand for, less `FIRST`.
    template <int R>
    INLINED static __m256i run(const uint8_t* block) {
        const bool small = F::NUMBERS == RUN;
        Codes codes = F::template codes<F::NUMBERS == RUN ? 0 : R>(block + (small ? R * F::BYTES : 0));
        if (std::is_same_v<F, IQ4_NL>) codes = values_of<F>(codes);
        return reinterpret_cast<__m256i>(codes);
    }

    // 16 bytes of one place and of another.
    INLINED static __m256i two(const uint8_t* first, const uint8_t* second) {
        __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(first));
        __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(second));
        return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    }

    // Bytes' lower nibbles, or their upper ones.
    template <bool UPPER>
    INLINED static __m256i nibbles_of(__m256i both) {
        return _mm256_and_si256(UPPER ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
    }

    // Codes of four pairs of 16: the halves of one run each, of four runs from the 4 H-th on; or of
    // `EIGHT` runs the H-th halves, of runs j and j + 4 each.
    template <int H, bool EIGHT>
    INLINED static void four_pairs(const uint8_t* block, __m256i* to) {
        if constexpr (!EIGHT) {
            to[0] = run<4 * H>(block), to[1] = run<4 * H + 1>(block);
            to[2] = run<4 * H + 2>(block), to[3] = run<4 * H + 3>(block);
        } else if constexpr (F::NUMBERS == RUN) {
            constexpr int AT = F::BYTES - (NIBBLES ? 16 : 32 - 16 * H);
            WRITTEN_OUT
            for (int j = 0; j < 4; j++) {
                to[j] = two(block + j * F::BYTES + AT, block + (j + 4) * F::BYTES + AT);
                if (NIBBLES) to[j] = nibbles_of<H>(to[j]);
                if constexpr (std::is_same_v<F, IQ4_NL>) {
                    auto values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(F::VALUES));
                    to[j] = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), to[j]);
                }
            }
        } else {  // two runs in the nibbles of 32 bytes
            const uint8_t* from = block + F::BYTES - 128 + 16 * H;
            WRITTEN_OUT
            for (int j = 0; j < 4; j += 2) {
                __m256i both = two(from + 16 * j, from + 16 * j + 64);
                to[j] = nibbles_of<false>(both), to[j + 1] = nibbles_of<true>(both);
            }
            if constexpr (F::LEVELS == 32) {  // a fifth bit of each run in each of 32 bytes
                __m256i bits = two(block + 16 + 16 * H, block + 16 + 16 * H);
                bits = _mm256_blend_epi32(bits, _mm256_srli_epi16(bits, 4), 0xf0);
                const __m256i sixteen = _mm256_set1_epi8(16);
                to[0] = _mm256_or_si256(to[0], _mm256_and_si256(_mm256_slli_epi16(bits, 4), sixteen));
                to[1] = _mm256_or_si256(to[1], _mm256_and_si256(_mm256_slli_epi16(bits, 3), sixteen));
                to[2] = _mm256_or_si256(to[2], _mm256_and_si256(_mm256_slli_epi16(bits, 2), sixteen));
                to[3] = _mm256_or_si256(to[3], _mm256_and_si256(_mm256_slli_epi16(bits, 1), sixteen));
            }
        }
    }

    // Scales and offsets of the groups of each part, in the order of the lanes.
    struct Factors {
        Vec scale[PARTS], offset[PARTS];
        __m256i fifth;  // bits of the runs of small blocks, 32 each
    };

    // Adds the fifth bits of the H-th halves of runs, four of each in a vector.
    template <int H>
    INLINED static void add_fifth_bits(__m256i fifth, __m256i* to) {
        const __m256i bits = _mm256_set1_epi32(static_cast<int>(0x80402010)), sixteen = _mm256_set1_epi8(16);
        WRITTEN_OUT
        for (int j = 0; j < 4; j += 2) {
            const int place = 2 * H + j / 2;
            const __m128i of_lanes = _mm_add_epi8(_mm_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0),
                                                  _mm_set1_epi8(static_cast<char>(place)));
            __m256i eight = _mm256_shuffle_epi8(fifth, _mm256_broadcastsi128_si256(of_lanes));
            __m256i first = _mm256_and_si256(_mm256_slli_epi16(eight, 4), bits);
            __m256i second = _mm256_and_si256(eight, bits);
            to[j] = _mm256_or_si256(to[j], _mm256_min_epu8(first, sixteen));
            to[j + 1] = _mm256_or_si256(to[j + 1], _mm256_min_epu8(second, sixteen));
        }
    }

    // Calls `visit(step, 16 codes)` for the eight steps from the 8 H-th on.
    template <int H, bool EIGHT = !F::HALVES, class Visit>
    INLINED static void half(const uint8_t* block, const Factors& given, Visit visit) {
        __m256i z[4];
        four_pairs<H, EIGHT>(block, z);
        __m256i a = _mm256_unpacklo_epi32(z[0], z[1]), b = _mm256_unpackhi_epi32(z[0], z[1]);
        __m256i c = _mm256_unpacklo_epi32(z[2], z[3]), d = _mm256_unpackhi_epi32(z[2], z[3]);
        __m256i lanes[4] = {_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c),
                            _mm256_unpacklo_epi64(b, d), _mm256_unpackhi_epi64(b, d)};
        if constexpr (EIGHT && NIBBLES && F::LEVELS == 32) add_fifth_bits<H>(given.fifth, lanes);
        WRITTEN_OUT
        for (int j = 0; j < 4; j++) {
            if (SIGNED) {
                visit(8 * H + 2 * j, _mm256_srai_epi16(_mm256_slli_epi16(lanes[j], 8), 8));
                visit(8 * H + 2 * j + 1, _mm256_srai_epi16(lanes[j], 8));
            } else {
                visit(8 * H + 2 * j, _mm256_and_si256(lanes[j], _mm256_set1_epi16(255)));
                visit(8 * H + 2 * j + 1, _mm256_srli_epi16(lanes[j], 8));
            }
        }
    }

    // Calls `visit(step, 16 codes)` for all steps of a block, and `next(part)` before each further part.
    template <class Visit, class Next>
    INLINED static void steps(const uint8_t* block, int left, const Factors& given, Visit visit, Next next) {
        if constexpr (F::NUMBERS == RUN) {
            if (few(left)) return half<0, false>(block, given, visit);
        }
        half<0>(block, given, visit);
        if (F::HALVES) next(1);
        half<1>(block, given, visit);
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
            __m256i head[2];
            __m256 scales, offsets;
            Singles::of_runs(block, head, scales, offsets);
            if (F::NUMBERS == RUN && left < BLOCK_WEIGHTS) {  // zeros behind the last run
                const __m256i runs = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                __m256 mask = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(left / RUN), runs));
                scales = _mm256_and_ps(scales, mask);
                offsets = _mm256_and_ps(offsets, mask);
                if (few(left)) {
                    scales = _mm256_permute2f128_ps(scales, scales, 0);
                    offsets = _mm256_permute2f128_ps(offsets, offsets, 0);
                }
            }
            if constexpr (NIBBLES && F::LEVELS == 32) {
                constexpr int BITS = 8 * (F::BYTES - 20);  // before a run's fifth bits
                __m256 first = _mm256_castsi256_ps(_mm256_srli_epi64(head[0], BITS));
                __m256 second = _mm256_castsi256_ps(_mm256_srli_epi64(head[1], BITS));
                found.fifth = _mm256_castps_si256(_mm256_shuffle_ps(first, second, 0x88));
            }
            found.scale[0] = {scales};
            found.offset[0] = {offsets};
        }
        return found;
    }

    static void decode(const uint8_t* row, int64_t ahead, int first, int inputs, char* to) {
        row += row_bytes<F>(first);
        each_block<F, true>(row, ahead, inputs, [&](const uint8_t* block, int left) INLINED {
            const Factors given = factors(block, left);
            auto keep = [&](int step, __m256i codes) INLINED {
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + step * 32), codes);
            };
            steps(block, left, given, keep, [](int) {});
            for (int part = 0; part < PARTS; part++) {
                if (F::OFFSETS) store(sums_at(to, part), given.offset[part]);
                store(units_at(to, part), given.scale[part]);
            }
            to += WEIGHT_BYTES;
        });
    }

    // The sums of a part of `x` before any product.
    INLINED static __m256i none(const char* x, int part) {
        auto sums = reinterpret_cast<const __m256i*>(sums_at(x, part));
        return SHIFTED ? _mm256_loadu_si256(sums) : _mm256_setzero_si256();
    }

    // A total and the sums of the groups of a part, in their scales and the units of x.
    INLINED static Vec plus(Vec total, __m256i sums, Vec scale, Vec unit) {
        return fma(Vec{_mm256_cvtepi32_ps(sums)} * scale, unit, total);
    }

    // A total less the offsets of the groups of a part, times the sums of x.
    INLINED static Vec less(Vec total, Vec offset, Vec of_x) {
        return {_mm256_fnmadd_ps(offset.v, of_x.v, total.v)};
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

    // As `add`, with no register for x: twelve sums leave room for that of two rows.
    INLINED static __m256i add_read(__m256i sums, const char* x, __m256i numbers) {
#if defined(__AVXVNNI__) || defined(ARBOR_EMULATED)
        return add(sums, x, numbers);
#else
        __m256i products;
        asm("vpmaddwd %2, %1, %0"
            : "=x"(products)
            : "x"(numbers), "m"(*reinterpret_cast<const __m256i_u*>(x)));
        sums = _mm256_add_epi32(sums, products);
        asm("" : "+x"(sums));
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
            __m256i acc[R];
            auto begin = [&](int part) INLINED {
                WRITTEN_OUT
                for (int r = 0; r < R; r++) acc[r] = none(x + r * x_row, part);
            };
            auto meet = [&](int step, __m256i codes) INLINED {
                WRITTEN_OUT
                for (int r = 0; r < R; r++) acc[r] = add(acc[r], x + r * x_row + step * 32, codes);
            };
            auto end = [&](int part) INLINED {
                WRITTEN_OUT
                for (int r = 0; r < R; r++) {
                    const char* of_x = x + r * x_row;
                    total[r] = plus(total[r], acc[r], given.scale[part], load(units_at(of_x, part)));
                    if (F::OFFSETS) total[r] = less(total[r], given.offset[part], load(sums_at(of_x, part)));
                }
            };
            begin(0);
            steps(block, left, given, meet, [&](int part) INLINED { end(part - 1), begin(part); });
            end(PARTS - 1);
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
            const int bytes = few(inputs - at) ? PART / 2 : PART;
            for (int part = 0; part < PARTS; part++) {
                __m256i acc[R][4];
                WRITTEN_OUT
                for (int r = 0; r < R; r++) {
                    WRITTEN_OUT
                    for (int p = 0; p < 4; p++) acc[r][p] = none(x + r * x_row, part);
                }
                for (int eight = part * PART; eight < part * PART + bytes; eight += 256) {
                    WRITTEN_OUT
                    for (int place = 0; place < 256; place += 32) {
                        WRITTEN_OUT
                        for (int p = 0; p < 4; p++) {
                            const char* from = weights + p * WEIGHT_ROW + eight + place;
                            __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
                            asm("" : "+x"(numbers));  // once for all rows
                            WRITTEN_OUT
                            for (int r = 0; r < R; r++) {
                                const char* with = x + r * x_row + eight + place;
                                acc[r][p] = r < 2 ? add(acc[r][p], with, numbers) : add_read(acc[r][p], with, numbers);
                            }
                        }
                    }
                }
                WRITTEN_OUT
                for (int r = 0; r < R; r++) {
                    Vec unit = load(units_at(x + r * x_row, part)), of_x = unit;
                    if (F::OFFSETS) of_x = load(sums_at(x + r * x_row, part));
                    WRITTEN_OUT
                    for (int p = 0; p < 4; p++) {
                        const char* of_output = weights + p * WEIGHT_ROW;
                        float* sum = sums + r * SUMS_ROW + p * 8;
                        Vec total = plus(load(sum), acc[r][p], load(units_at(of_output, part)), unit);
                        if (F::OFFSETS) total = less(total, load(sums_at(of_output, part)), of_x);
                        store(sum, total);
                        asm("" ::: "memory");  // not in registers, which the products need
                    }
                }
            }
        }
    }
};

}  // namespace

#endif
