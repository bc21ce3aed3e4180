// Codes of blocks as bytes, for x in bfloat16 and CPUs of aarch64 with dot products of bytes.
//
// A lane of 32 bits sums the products of one group, the 16 or 32 weights that share a scale; four
// groups are summed at a time, then scaled together, and offsets are met by the sums of x over groups.
// Every code is exact. Numbers of x are whole ones of 15 bits in a unit of their group, each two signed
// bytes: exact but for those below 1/64 of the largest of their group, which are rounded to 2^-14 of it.
#pragma once

#include "blocks.h"

#if defined(__ARM_FEATURE_DOTPROD)

namespace {

template <class F>
struct DotLanes {
    using Format = F;
    static constexpr int GROUP = F::HALVES ? 16 : RUN, GROUPS = BLOCK_WEIGHTS / GROUP;
    static constexpr int FOURS = GROUPS / 4, STEPS = GROUP / 4;  // of groups; bytes of a group at a time
    static constexpr int ROWS = 2, FUSED_ROWS = 4;
    static constexpr int X_BYTES = 2 * BLOCK_WEIGHTS + 8 * GROUPS;   // bytes, units and sums of groups
    static constexpr int WEIGHT_BYTES = BLOCK_WEIGHTS + 8 * GROUPS;  // codes, scales, offsets

    static int64_t x_bytes(int inputs) { return weight_blocks(inputs) * X_BYTES; }
    static constexpr int64_t WEIGHT_ROW = weight_blocks(MOST_DECODED) * WEIGHT_BYTES;

    static const float* units(const char* x) { return reinterpret_cast<const float*>(x + 2 * BLOCK_WEIGHTS); }
    static const float* scales(const char* weights) {
        return reinterpret_cast<const float*>(weights + BLOCK_WEIGHTS);
    }

    // The upper and the lower bytes of x in the order in which codes meet them; zeros behind the last.
    static void read_x(const bf16* x, int inputs, char* to) {
        for (int first = 0; first < inputs; first += BLOCK_WEIGHTS, to += X_BYTES) {
            bf16 block[BLOCK_WEIGHTS] = {0};
            size_t here = inputs - first < BLOCK_WEIGHTS ? inputs - first : BLOCK_WEIGHTS;
            std::memcpy(block, x + first, here * sizeof(bf16));
            float* of_groups = reinterpret_cast<float*>(to + 2 * BLOCK_WEIGHTS);
            for (int g = 0; g < GROUPS; g++) {
                char* lane = to + g / 4 * STEPS * 32 + g % 4 * 4;
                read_group(block + g * GROUP, lane, of_groups + g, of_groups + GROUPS + g);
            }
        }
    }

    // One group: its unit, a power of two or NaN if a number is not finite, and its sum.
    static void read_group(const bf16* from, char* to, float* unit, float* total) {
        uint16x8_t greatest = vdupq_n_u16(0);
        for (int i = 0; i < GROUP; i += 8) {
            greatest = vmaxq_u16(greatest, vandq_u16(vld1q_u16(from + i), vdupq_n_u16(0x7fff)));
        }
        int exponent = vmaxvq_u16(greatest) >> 7;
        bool finite = exponent < 255;
        exponent = exponent > 30 ? exponent : 30;  // smaller ones than 2^-110 are zeros
        *unit = finite ? power(exponent - 13) : NAN;
        Vec times = set1(finite ? power(254 + 13 - exponent) : 0.0f);
        int32x4_t sums = vdupq_n_s32(0);
        for (int i = 0; i < GROUP; i += 8) {
            int32x4_t first = vcvtnq_s32_f32((load(from + i) * times).v);
            int32x4_t second = vcvtnq_s32_f32((load(from + i + 4) * times).v);
            sums = vaddq_s32(sums, vaddq_s32(first, second));
            int16x8_t whole = vcombine_s16(vmovn_s32(first), vmovn_s32(second));
            int32_t upper[2], lower[2];  // upper * 256 + lower
            int8x8_t high = vrshrn_n_s16(whole, 8), low = vmovn_s16(whole);
            std::memcpy(upper, &high, 8);
            std::memcpy(lower, &low, 8);
            for (int j = 0; j < 2; j++, to += 32) {
                std::memcpy(to, upper + j, 4);
                std::memcpy(to + 16, lower + j, 4);
            }
        }
        *total = static_cast<float>(vaddvq_s32(sums)) * *unit;
    }

    // Words of four vectors become those of their places.
    static void four_by_four(const int8x16_t* from, int8x16_t* to) {
        int32x4_t a = vreinterpretq_s32_s8(from[0]), b = vreinterpretq_s32_s8(from[1]);
        int32x4_t c = vreinterpretq_s32_s8(from[2]), d = vreinterpretq_s32_s8(from[3]);
        int64x2_t first = vreinterpretq_s64_s32(vtrn1q_s32(a, b)), second = vreinterpretq_s64_s32(vtrn2q_s32(a, b));
        int64x2_t third = vreinterpretq_s64_s32(vtrn1q_s32(c, d)), fourth = vreinterpretq_s64_s32(vtrn2q_s32(c, d));
        to[0] = vreinterpretq_s8_s64(vtrn1q_s64(first, third));
        to[1] = vreinterpretq_s8_s64(vtrn1q_s64(second, fourth));
        to[2] = vreinterpretq_s8_s64(vtrn2q_s64(first, third));
        to[3] = vreinterpretq_s8_s64(vtrn2q_s64(second, fourth));
    }

    template <int R>
    static void halves_of(const uint8_t* block, int8x16_t* first, int8x16_t* second) {
        Codes run = F::NUMBERS == RUN ? F::template codes<0>(block + R * F::BYTES)
                                      : F::template codes<R % (F::NUMBERS / RUN)>(block);
        run = values_of<F>(run);
        int8x16_t halves[2];
        std::memcpy(halves, &run, sizeof halves);
        *first = halves[0], *second = halves[1];
    }

    // What four groups stand for, a word of each in every step.
    template <int FOUR>
    INLINED static void codes(const uint8_t* block, int8x16_t* to) {
        int8x16_t first[4], second[4];
        if constexpr (F::HALVES) {
            halves_of<2 * FOUR>(block, first, first + 1);
            halves_of<2 * FOUR + 1>(block, first + 2, first + 3);
            four_by_four(first, to);
        } else {
            halves_of<4 * FOUR>(block, first, second);
            halves_of<4 * FOUR + 1>(block, first + 1, second + 1);
            halves_of<4 * FOUR + 2>(block, first + 2, second + 2);
            halves_of<4 * FOUR + 3>(block, first + 3, second + 3);
            four_by_four(first, to);
            four_by_four(second, to + 4);
        }
    }

    static void prepare(const uint8_t* block, Scales& to) {
        if constexpr (F::NUMBERS == BLOCK_WEIGHTS) {
            F::prepare(block, to);
        } else {
            for (int run = 0; run < GROUPS; run++) {
                Scales one;
                F::prepare(block + run * F::BYTES, one);
                to.scale[run] = one.scale[0];
                if (F::OFFSETS) to.offset[run] = one.offset[0];
            }
        }
    }

    template <class Visit, int... FOUR>
    INLINED static void fours(Visit visit, std::integer_sequence<int, FOUR...>) {
        (visit(std::integral_constant<int, FOUR>{}), ...);
    }

    // Calls `visit` for each four groups of a block.
    template <class Visit>
    INLINED static void fours(Visit visit) {
        fours(visit, std::make_integer_sequence<int, FOURS>{});
    }

    static void decode(const uint8_t* row, int64_t ahead, int first, int inputs, char* to) {
        each_block<F>(row + row_bytes<F>(first), ahead, inputs, [&](const uint8_t* block, int) INLINED {
            Scales found;
            prepare(block, found);
            fours([&](auto four) INLINED {
                int8x16_t numbers[STEPS];
                codes<four>(block, numbers);
                std::memcpy(to + four * STEPS * 16, numbers, sizeof numbers);
            });
            std::memcpy(to + BLOCK_WEIGHTS, found.scale, GROUPS * 4);
            if (F::OFFSETS) std::memcpy(to + BLOCK_WEIGHTS + GROUPS * 4, found.offset, GROUPS * 4);
            to += WEIGHT_BYTES;
        });
    }

    // Sums of the products with the upper and the lower bytes of x.
    struct Sums {
        int32x4_t upper = vdupq_n_s32(0), lower = vdupq_n_s32(0);

        INLINED void add(int8x16_t codes, const char* x) {
            auto bytes = reinterpret_cast<const int8_t*>(x);
            upper = vdotq_s32(upper, codes, vld1q_s8(bytes));
            lower = vdotq_s32(lower, codes, vld1q_s8(bytes + 16));
        }

        // Scaled, added to a total, and less the offsets' part; `x` has units and, after all groups', sums.
        INLINED Vec scaled(const float* scale, const float* offset, const float* x, Vec total) const {
            int32x4_t whole = vmlaq_n_s32(lower, upper, 256);
            total = fma(Vec{vcvtq_f32_s32(whole)} * load(scale), load(x), total);
            return F::OFFSETS ? Vec{vfmsq_f32(total.v, load(offset).v, load(x + GROUPS).v)} : total;
        }
    };

    // R rows of x by one output whose weights are never stored: the sums of `tile`.
    template <int R>
    static void fused(const char* x, int64_t x_row, const uint8_t* row, int64_t ahead, int inputs,
                      bool begins, float* sums) {
        Vec total[R];
        WRITTEN_OUT
        for (int r = 0; r < R; r++) total[r] = begins ? set1(0.0f) : load(sums + r * SUMS_ROW);
        each_block<F>(row, ahead, inputs, [&](const uint8_t* block, int) INLINED {
            Scales found;
            prepare(block, found);
            fours([&](auto four) INLINED {
                int8x16_t numbers[STEPS];
                codes<four>(block, numbers);
                WRITTEN_OUT
                for (int r = 0; r < R; r++) {
                    const char* from = x + r * x_row;
                    Sums of_groups;
                    WRITTEN_OUT
                    for (int step = 0; step < STEPS; step++) {
                        of_groups.add(numbers[step], from + (four * STEPS + step) * 32);
                    }
                    total[r] = of_groups.scaled(found.scale + 4 * four, found.offset + 4 * four,
                                                units(from) + 4 * four, total[r]);
                }
            });
            x += X_BYTES;
        });
        WRITTEN_OUT
        for (int r = 0; r < R; r++) store(sums + r * SUMS_ROW, total[r]);
    }

    // As `PlainLanes::tile`.
    template <int R>
    static void tile(const char* x, int64_t x_row, const char* weights, int inputs, bool begins,
                     float* sums) {
        Vec total[R][4];
        WRITTEN_OUT
        for (int r = 0; r < R; r++) {
            WRITTEN_OUT
            for (int p = 0; p < 4; p++) total[r][p] = begins ? set1(0.0f) : load(sums + r * SUMS_ROW + p * 4);
        }
        for (int at = 0; at < inputs; at += BLOCK_WEIGHTS, x += X_BYTES, weights += WEIGHT_BYTES) {
            for (int four = 0; four < FOURS; four++) {
                Sums of_groups[R][4];
                WRITTEN_OUT
                for (int step = 0; step < STEPS; step++) {
                    int place = four * STEPS + step;
                    WRITTEN_OUT
                    for (int p = 0; p < 4; p++) {
                        auto from = reinterpret_cast<const int8_t*>(weights + p * WEIGHT_ROW + place * 16);
                        int8x16_t numbers = vld1q_s8(from);
                        WRITTEN_OUT
                        for (int r = 0; r < R; r++) of_groups[r][p].add(numbers, x + r * x_row + place * 32);
                    }
                }
                WRITTEN_OUT
                for (int p = 0; p < 4; p++) {
                    const float* scale = scales(weights + p * WEIGHT_ROW) + 4 * four;
                    WRITTEN_OUT
                    for (int r = 0; r < R; r++) {
                        total[r][p] = of_groups[r][p].scaled(scale, scale + GROUPS,
                                                             units(x + r * x_row) + 4 * four, total[r][p]);
                    }
                }
            }
        }
        WRITTEN_OUT
        for (int r = 0; r < R; r++) {
            WRITTEN_OUT
            for (int p = 0; p < 4; p++) store(sums + r * SUMS_ROW + p * 4, total[r][p]);
        }
    }
};

}  // namespace

#endif
