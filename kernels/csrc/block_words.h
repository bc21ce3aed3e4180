// Codes of blocks as pairs of 16-bit whole numbers, for x in bfloat16 and CPUs with AVX2 alone.
//
// As block_pairs.h, by halves of a block: eight groups of 16 weights, a lane each. Numbers of x are
// whole in a unit of their group: exact but for those below 1/128 of the largest of their group,
// which are rounded to 2^-15 of it.
#pragma once

#include "block_singles.h"

#if defined(__x86_64__) && !defined(__AVX512F__)

namespace {

// The group whose sum a lane holds, of the eight of a half.
constexpr int group_in_half(int lane) { return 2 * (lane % 4) + lane / 4; }

template <class F>
struct WordLanes {
    using Singles = SingleLanes<F>;
    static constexpr int ROWS = 2, FUSED_ROWS = 8, HALF = 256;  // bytes of numbers of a half
    static constexpr int X_BYTES = 512 + 2 * 64;                // and sums and units of groups
    static constexpr int WEIGHT_BYTES = 512 + 2 * 64;           // and scales and offsets of groups
    static constexpr int BYTES = Singles::BYTES;

    static int64_t x_bytes(int inputs) { return Singles::blocks_of(inputs) * X_BYTES; }
    static int64_t weight_bytes(int inputs) { return Singles::blocks_of(inputs) * WEIGHT_BYTES; }
    static int64_t row_bytes(int inputs) { return Singles::row_bytes(inputs); }

    // Numbers of x in the order in which codes meet them; zeros behind the last.
    static void read_x(const bf16* x, int inputs, char* to) {
        for (int first = 0; first < inputs; first += BLOCK_WEIGHTS, to += X_BYTES) {
            bf16 block[BLOCK_WEIGHTS] = {0};
            int here = inputs - first < BLOCK_WEIGHTS ? inputs - first : BLOCK_WEIGHTS;
            std::memcpy(block, x + first, here * sizeof(bf16));
            int16_t* numbers = reinterpret_cast<int16_t*>(to);
            float* sums = reinterpret_cast<float*>(to + 2 * HALF);
            for (int g = 0; g < 16; g++) {
                int half = g / 8, lane = g % 8, sum = 0;
                int16_t group[16];
                float unit = whole_numbers(block + 16 * (8 * half + group_in_half(lane)), group);
                for (int j = 0; j < 16; j++) {
                    // bytes 0 and 2 of four meet the first of two steps, bytes 1 and 3 the second
                    numbers[half * HALF / 2 + (j / 4 * 2 + j % 2) * 16 + 2 * lane + j % 4 / 2] = group[j];
                    sum += group[j];
                }
                sums[g] = static_cast<float>(sum) * unit;
                sums[16 + g] = unit;
            }
        }
    }

    // 16 numbers in a unit that is a power of two, which is returned; NaN if one is not finite.
    static float whole_numbers(const bf16* from, int16_t* to) {
        int greatest = 0;
        for (int j = 0; j < 16; j++) {
            int size = from[j] & 0x7fff;
            greatest = size > greatest ? size : greatest;
        }
        int exponent = greatest >> 7;
        if (exponent == 255) {
            std::memset(to, 0, 32);
            return NAN;
        }
        exponent = exponent > 30 ? exponent : 30;  // smaller ones than 2^-111 are zeros
        Vec times = set1(power(254 + 14 - exponent));
        __m256i low = _mm256_cvtps_epi32((load(from) * times).v);
        __m256i high = _mm256_cvtps_epi32((load(from + 8) * times).v);
        __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), both);
        return power(exponent - 14);
    }

    template <int R>
    static __m256i run(const uint8_t* block) {
        Codes codes = F::NUMBERS == RUN ? F::template codes<0>(block + R * F::BYTES)
                                        : F::template codes<R % (F::NUMBERS / RUN)>(block);
        if (std::is_same_v<F, IQ4_NL>) codes = values_of<F>(codes);
        return reinterpret_cast<__m256i>(codes);
    }

    // Calls `visit(step, 16 numbers)` for the eight steps of a half.
    template <int H, class Visit>
    static void half(const uint8_t* block, Visit visit) {
        constexpr bool SIGNED = F::LEVELS == 256 || std::is_same_v<F, IQ4_NL>;
        const __m256i z[4] = {run<4 * H>(block), run<4 * H + 1>(block), run<4 * H + 2>(block),
                              run<4 * H + 3>(block)};
        __m256i a = _mm256_unpacklo_epi32(z[0], z[1]), b = _mm256_unpackhi_epi32(z[0], z[1]);
        __m256i c = _mm256_unpacklo_epi32(z[2], z[3]), d = _mm256_unpackhi_epi32(z[2], z[3]);
        const __m256i lanes[4] = {_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c),
                                  _mm256_unpacklo_epi64(b, d), _mm256_unpackhi_epi64(b, d)};
        const __m256i first = _mm256_set1_epi16(SIGNED ? 0 : F::FIRST);
        WRITTEN_OUT
        for (int j = 0; j < 4; j++) {
            __m256i even, odd;
            if (SIGNED) {
                even = _mm256_srai_epi16(_mm256_slli_epi16(lanes[j], 8), 8);
                odd = _mm256_srai_epi16(lanes[j], 8);
            } else {
                even = _mm256_and_si256(lanes[j], _mm256_set1_epi16(255));
                odd = _mm256_srli_epi16(lanes[j], 8);
            }
            if (!SIGNED && F::FIRST) even = _mm256_add_epi16(even, first), odd = _mm256_add_epi16(odd, first);
            visit(2 * j, even);
            visit(2 * j + 1, odd);
        }
    }

    // Numbers of the groups of a half, or of their runs, in the order of the lanes.
    static Vec in_lanes(const float* numbers, int half) {
        if (!F::HALVES) return {_mm256_broadcast_ps(reinterpret_cast<const __m128*>(numbers + 4 * half))};
        const __m256i order = _mm256_set_epi32(7, 5, 3, 1, 6, 4, 2, 0);
        return {_mm256_permutevar8x32_ps(_mm256_loadu_ps(numbers + 8 * half), order)};
    }

    static void decode(const uint8_t* row, int64_t ahead, int first, int inputs, char* to) {
        Singles::blocks(row + row_bytes(first), ahead, inputs, [&](const uint8_t* block) {
            Scales scales;
            Singles::prepare(block, scales);
            Singles::parts([&](auto h) {
                half<h>(block, [&](int step, __m256i numbers) {
                    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + h * HALF + step * 32), numbers);
                });
                float* factors = reinterpret_cast<float*>(to + 2 * HALF) + 8 * h;
                store(factors, in_lanes(scales.scale, h));
                if (F::OFFSETS) store(factors + 16, in_lanes(scales.offset, h));
            }, std::make_integer_sequence<int, 2>{});
            to += WEIGHT_BYTES;
        });
    }

    // Sums of the groups of a half, scaled and added to a total; `x` has their sums and units.
    static Vec scaled(__m256i sums, Vec scale, Vec offset, const float* x, Vec total) {
        total = fma(Vec{_mm256_cvtepi32_ps(sums)} * scale, load(x + 16), total);
        return F::OFFSETS ? Vec{_mm256_fnmadd_ps(offset.v, load(x).v, total.v)} : total;
    }

    static __m256i add(__m256i sums, const char* x, __m256i numbers) {
        __m256i factor = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
        return _mm256_add_epi32(sums, _mm256_madd_epi16(factor, numbers));
    }

    // R rows of x by one output whose weights are never stored: the sums of `tile`.
    template <int R>
    static void fused(const char* x, int64_t x_row, const uint8_t* row, int64_t ahead, int inputs,
                      bool begins, float* sums, int64_t sums_row) {
        Vec total[R];
        WRITTEN_OUT
        for (int r = 0; r < R; r++) total[r] = begins ? set1(0.0f) : load(sums + r * sums_row);
        Singles::blocks(row, ahead, inputs, [&](const uint8_t* block) {
            Scales scales;
            Singles::prepare(block, scales);
            Singles::parts([&](auto h) {
                __m256i acc[R];
                WRITTEN_OUT
                for (int r = 0; r < R; r++) acc[r] = _mm256_setzero_si256();
                half<h>(block, [&](int step, __m256i numbers) {
                    WRITTEN_OUT
                    for (int r = 0; r < R; r++) acc[r] = add(acc[r], x + r * x_row + h * HALF + step * 32, numbers);
                });
                Vec scale = in_lanes(scales.scale, h), offset = scale;
                if (F::OFFSETS) offset = in_lanes(scales.offset, h);
                WRITTEN_OUT
                for (int r = 0; r < R; r++) {
                    const float* groups = reinterpret_cast<const float*>(x + r * x_row + 2 * HALF) + 8 * h;
                    total[r] = scaled(acc[r], scale, offset, groups, total[r]);
                }
            }, std::make_integer_sequence<int, 2>{});
            x += X_BYTES;
        });
        WRITTEN_OUT
        for (int r = 0; r < R; r++) store(sums + r * sums_row, total[r]);
    }

    // As `PlainLanes::tile`; the sums stay in the L1 cache.
    template <int R>
    static void tile(const char* x, int64_t x_row, const char* weights, int64_t weight_row, int inputs,
                     bool begins, float* sums, int64_t sums_row) {
        if (begins) {
            for (int r = 0; r < R; r++) {
                for (int p = 0; p < 4; p++) store(sums + r * sums_row + p * 8, set1(0.0f));
            }
        }
        for (int at = 0; at < inputs; at += BLOCK_WEIGHTS, x += X_BYTES, weights += WEIGHT_BYTES) {
            for (int h = 0; h < 2; h++) {
                __m256i acc[R][4];
                WRITTEN_OUT
                for (int r = 0; r < R; r++) {
                    WRITTEN_OUT
                    for (int p = 0; p < 4; p++) acc[r][p] = _mm256_setzero_si256();
                }
                WRITTEN_OUT
                for (int step = 0; step < 8; step++) {
                    int place = h * HALF + step * 32;
                    WRITTEN_OUT
                    for (int p = 0; p < 4; p++) {
                        const char* from = weights + p * weight_row + place;
                        __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
                        WRITTEN_OUT
                        for (int r = 0; r < R; r++) acc[r][p] = add(acc[r][p], x + r * x_row + place, numbers);
                    }
                }
                WRITTEN_OUT
                for (int p = 0; p < 4; p++) {
                    const float* factors = reinterpret_cast<const float*>(weights + p * weight_row + 2 * HALF) + 8 * h;
                    Vec scale = load(factors), offset = scale;
                    if (F::OFFSETS) offset = load(factors + 16);
                    WRITTEN_OUT
                    for (int r = 0; r < R; r++) {
                        const float* groups = reinterpret_cast<const float*>(x + r * x_row + 2 * HALF) + 8 * h;
                        float* sum = sums + r * sums_row + p * 8;
                        store(sum, scaled(acc[r][p], scale, offset, groups, load(sum)));
                    }
                }
            }
        }
    }
};

}  // namespace

#endif
