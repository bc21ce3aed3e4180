// Codes of blocks in float32, for x in float32 on x86.
//
// Codes come in parts of four vectors: a lane's 32 bits hold four of them, the b-th vector the b-th
// byte of each lane. A part's products are summed and then scaled, each lane by the scale of its
// group; offsets are met by the sums of x over groups. Every code is exact.
#pragma once

#include "blocks.h"
#include "linear.h"

#if defined(__x86_64__)

namespace {

#if defined(__AVX512F__)

using Whole = __m512i;  // `Vec::WIDTH` whole numbers of 32 bits

inline Whole byte_mask(int place) { return _mm512_set1_epi32(static_cast<int>(255u << (8 * place))); }
inline Whole both(Whole a, Whole b) { return _mm512_and_si512(a, b); }
inline Whole left(Whole a, int bits) { return _mm512_slli_epi32(a, static_cast<unsigned>(bits)); }
inline Whole right_signed(Whole a, int bits) { return _mm512_srai_epi32(a, static_cast<unsigned>(bits)); }
inline Vec floats(Whole a) { return {_mm512_cvtepi32_ps(a)}; }


// Each of some numbers in as many lanes: 4 numbers in 4 each, 2 in 8 each.
template <int LANES>
inline Vec in_groups(const float* numbers) {
    const __m512i four = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    const __m512i two = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    __m512 from = _mm512_castps128_ps512(_mm_loadu_ps(numbers));
    return {_mm512_permutexvar_ps(LANES == 4 ? four : two, from)};
}

inline Whole joined(const Codes* runs) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(reinterpret_cast<__m256i>(runs[0])),
                              reinterpret_cast<__m256i>(runs[1]), 1);
}

#else

using Whole = __m256i;

inline Whole byte_mask(int place) { return _mm256_set1_epi32(static_cast<int>(255u << (8 * place))); }
inline Whole both(Whole a, Whole b) { return _mm256_and_si256(a, b); }
inline Whole left(Whole a, int bits) { return _mm256_slli_epi32(a, bits); }
inline Whole right_signed(Whole a, int bits) { return _mm256_srai_epi32(a, bits); }
inline Vec floats(Whole a) { return {_mm256_cvtepi32_ps(a)}; }

// Each of some numbers in as many lanes: 2 numbers in 4 each, one in all.
template <int LANES>
inline Vec in_groups(const float* numbers) {
    __m128 first = _mm_broadcast_ss(numbers);
    __m128 second = LANES == 4 ? _mm_broadcast_ss(numbers + 1) : first;
    return {_mm256_set_m128(second, first)};
}

inline Whole joined(const Codes* runs) { return reinterpret_cast<Whole>(runs[0]); }

#endif

template <class F>
struct SingleLanes {
    using Format = F;
    static constexpr int ROWS = 3, FUSED_ROWS = 8;
    static constexpr int RUNS = Vec::WIDTH / 8, PARTS = 8 / RUNS;  // of a part, of a block
    static constexpr int GROUP = F::HALVES ? 16 : 32, GROUPS = BLOCK_WEIGHTS / GROUP;
    static constexpr bool SIGNED = F::FIRST != 0 || F::LEVELS == 256 || std::is_same_v<F, IQ4_NL>;
    static constexpr int X_NUMBERS = BLOCK_WEIGHTS + 16;            // and sums of groups
    static constexpr int WEIGHT_NUMBERS = BLOCK_WEIGHTS + 64 + 16;  // and scales of lanes, offsets
    static int64_t x_bytes(int inputs) { return weight_blocks(inputs) * X_NUMBERS * 4; }
    static constexpr int64_t WEIGHT_ROW = weight_blocks(MOST_DECODED) * WEIGHT_NUMBERS * 4;

    // Numbers of x in the order in which codes meet them; zeros behind the last. A byte that is not
    // moved to the lowest place stands for a greater number, which its factor makes up for.
    template <class Number>
    static void read_x(const Number* from, int inputs, char* to) {
        for (int first = 0; first < inputs; first += BLOCK_WEIGHTS, to += X_NUMBERS * 4) {
            float block[BLOCK_WEIGHTS] = {0};
            int here = inputs - first < BLOCK_WEIGHTS ? inputs - first : BLOCK_WEIGHTS;
            copy_row(from + first, here, block);
            float* numbers = reinterpret_cast<float*>(to);
            for (int i = 0; i < BLOCK_WEIGHTS; i++) {
                int part = i / (4 * Vec::WIDTH), lane = i / 4 % Vec::WIDTH, b = i % 4;
                float factor = SIGNED ? 1.0f : 1.0f / static_cast<float>(1 << (8 * b));
                numbers[(part * 4 + b) * Vec::WIDTH + lane] = block[i] * factor;
            }
            for (int g = 0; g < GROUPS; g++) {
                Vec sums = set1(0.0f);
                for (int i = 0; i < GROUP; i += Vec::WIDTH) sums = sums + load(block + g * GROUP + i);
                numbers[BLOCK_WEIGHTS + g] = sum(sums);
            }
        }
    }

    template <int P, int... R>
    static Whole codes(const uint8_t* block, std::integer_sequence<int, R...>) {
        if constexpr (F::NUMBERS == RUN) {
            const Codes runs[] = {values_of<F>(F::template codes<0>(block + (P * RUNS + R) * F::BYTES))...};
            return joined(runs);
        } else {
            const Codes runs[] = {values_of<F>(F::template codes<P * RUNS + R>(block))...};
            return joined(runs);
        }
    }

    // The four vectors of a part.
    template <int P>
    static void part(const uint8_t* block, Vec* to) {
        Whole bytes = codes<P>(block, std::make_integer_sequence<int, RUNS>{});
        for (int b = 0; b < 4; b++) {
            if (SIGNED) to[b] = floats(right_signed(b < 3 ? left(bytes, 24 - 8 * b) : bytes, 24));
            else to[b] = floats(both(bytes, byte_mask(b)));
        }
    }

    // The first eight bytes of two runs, and of the two that are four runs later.
    INLINED static __m256i heads(const uint8_t* block) {
        auto two = [](const uint8_t* from) {
            __m128 first = _mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
            return _mm_castps_si128(_mm_loadh_pi(first, reinterpret_cast<const __m64*>(from + F::BYTES)));
        };
        return _mm256_inserti128_si256(_mm256_castsi128_si256(two(block)), two(block + 4 * F::BYTES), 1);
    }

    // Scales and offsets of the eight runs of a block whose runs have one each. Formats of small blocks
    // have them in `heads`, kept here too.
    INLINED static void of_runs(const uint8_t* block, __m256i* head, __m256& scales, __m256& offsets) {
        if constexpr (F::NUMBERS == BLOCK_WEIGHTS) {
            six_bits(block, scales, offsets);
        } else {  // as `Small::prepare`, all runs at once
            head[0] = heads(block), head[1] = heads(block + 2 * F::BYTES);
            const __m128i two = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, -1, -1, -1, -1, -1, -1, -1, -1);
            const __m256i halves = _mm256_broadcastsi128_si256(two);
            __m256i first = _mm256_shuffle_epi8(head[0], halves);
            __m256i second = _mm256_shuffle_epi8(head[1], halves);
            __m256i both = _mm256_unpacklo_epi32(first, second);
            __m128i low = _mm256_castsi256_si128(both), high = _mm256_extracti128_si256(both, 1);
            scales = _mm256_cvtph_ps(_mm_unpacklo_epi64(low, high));
            offsets = _mm256_cvtph_ps(_mm_unpackhi_epi64(low, high));
            offsets = _mm256_sub_ps(_mm256_setzero_ps(), offsets);
        }
    }

    INLINED static void prepare(const uint8_t* block, Scales& to) {
        if constexpr (F::HALVES) {
            F::prepare(block, to);
        } else {
            __m256i head[2];
            __m256 scales, offsets;
            of_runs(block, head, scales, offsets);
            _mm256_store_ps(to.scale, scales);
            if (F::OFFSETS) _mm256_store_ps(to.offset, offsets);
        }
    }

    template <int P>
    static Vec scale(const Scales& scales) {
        return in_groups<GROUP / 4>(scales.scale + P * 4 * Vec::WIDTH / GROUP);
    }

    template <class Visit, int... P>
    static void parts(Visit visit, std::integer_sequence<int, P...>) {
        (visit(std::integral_constant<int, P>{}), ...);
    }

    template <class Visit>
    static void parts(Visit visit) {
        parts(visit, std::make_integer_sequence<int, PARTS>{});
    }

    static void decode(const uint8_t* row, int64_t ahead, int first, int inputs, char* to) {
        each_block<F>(row + row_bytes<F>(first), ahead, inputs, [&](const uint8_t* block, int) {
            float* numbers = reinterpret_cast<float*>(to);
            Scales scales;
            prepare(block, scales);
            parts([&](auto p) {
                Vec codes[4];
                part<p>(block, codes);
                for (int b = 0; b < 4; b++) store(numbers + (p * 4 + b) * Vec::WIDTH, codes[b]);
                store(numbers + BLOCK_WEIGHTS + p * Vec::WIDTH, scale<p>(scales));
            });
            if (F::OFFSETS) std::memcpy(numbers + BLOCK_WEIGHTS + 64, scales.offset, GROUPS * 4);
            to += WEIGHT_NUMBERS * 4;
        });
    }

    // A sum less the offsets' part of a block.
    static Vec less_offsets(Vec total, const float* offsets, const float* sums) {
        for (int g = 0; g < GROUPS; g += Vec::WIDTH) {
            if constexpr (GROUPS < Vec::WIDTH) {
                total = total - load_first(offsets, GROUPS, 0.0f) * load_first(sums, GROUPS, 0.0f);
            } else {
                total = total - load(offsets + g) * load(sums + g);
            }
        }
        return total;
    }

    // R rows of x by one output whose weights are never stored: the sums of `tile`.
    template <int R>
    static void fused(const char* x, int64_t x_row, const uint8_t* row, int64_t ahead, int inputs,
                      bool begins, float* sums) {
        Vec total[R];
        WRITTEN_OUT
        for (int r = 0; r < R; r++) total[r] = begins ? set1(0.0f) : load(sums + r * SUMS_ROW);
        each_block<F>(row, ahead, inputs, [&](const uint8_t* block, int) {
            Scales scales;
            prepare(block, scales);
            auto x_at = [&](int r) { return reinterpret_cast<const float*>(x + r * x_row); };
            parts([&](auto p) {
                Vec codes[4];
                part<p>(block, codes);
                Vec factor = scale<p>(scales);
                WRITTEN_OUT
                for (int r = 0; r < R; r++) {
                    const float* numbers = x_at(r) + p * 4 * Vec::WIDTH;
                    Vec found = codes[0] * load(numbers);
                    WRITTEN_OUT
                    for (int b = 1; b < 4; b++) found = fma(codes[b], load(numbers + b * Vec::WIDTH), found);
                    total[r] = fma(found, factor, total[r]);
                }
            });
            if (F::OFFSETS) {
                WRITTEN_OUT
                for (int r = 0; r < R; r++) {
                    total[r] = less_offsets(total[r], scales.offset, x_at(r) + BLOCK_WEIGHTS);
                }
            }
            x += X_NUMBERS * 4;
        });
        WRITTEN_OUT
        for (int r = 0; r < R; r++) store(sums + r * SUMS_ROW, total[r]);
    }

    // As `PlainLanes::tile`.
    template <int R>
    static void tile(const char* x, int64_t x_row, const char* weights, int inputs, bool begins,
                     float* sums) {
        constexpr int OUTPUTS = Vec::WIDTH == 16 ? 4 : 2;  // whose sums stay in registers
        for (int first = 0; first < 4; first += OUTPUTS) {
            few<R, OUTPUTS>(x, x_row, weights + first * WEIGHT_ROW, inputs, begins, sums + first * Vec::WIDTH);
        }
    }

    template <int R, int OUTPUTS>
    static void few(const char* x, int64_t x_row, const char* weights, int inputs, bool begins,
                    float* sums) {
        Vec total[R][OUTPUTS];
        const float *x_at[R], *weight_at[OUTPUTS];
        for (int p = 0; p < OUTPUTS; p++) {
            weight_at[p] = reinterpret_cast<const float*>(weights + p * WEIGHT_ROW);
        }
        WRITTEN_OUT
        for (int r = 0; r < R; r++) {
            x_at[r] = reinterpret_cast<const float*>(x + r * x_row);
            WRITTEN_OUT
            for (int p = 0; p < OUTPUTS; p++) {
                total[r][p] = begins ? set1(0.0f) : load(sums + r * SUMS_ROW + p * Vec::WIDTH);
            }
        }
        for (int at = 0; at < inputs; at += BLOCK_WEIGHTS) {
            for (int part = 0; part < PARTS; part++) {
                Vec found[R][OUTPUTS];
                WRITTEN_OUT
                for (int b = 0; b < 4; b++) {
                    Vec codes[OUTPUTS];
                    int place = (part * 4 + b) * Vec::WIDTH;
                    WRITTEN_OUT
                    for (int p = 0; p < OUTPUTS; p++) codes[p] = load(weight_at[p] + place);
                    WRITTEN_OUT
                    for (int r = 0; r < R; r++) {
                        Vec number = load(x_at[r] + place);
                        WRITTEN_OUT
                        for (int p = 0; p < OUTPUTS; p++) {
                            found[r][p] = b ? fma(codes[p], number, found[r][p]) : codes[p] * number;
                        }
                    }
                }
                WRITTEN_OUT
                for (int p = 0; p < OUTPUTS; p++) {
                    Vec factor = load(weight_at[p] + BLOCK_WEIGHTS + part * Vec::WIDTH);
                    WRITTEN_OUT
                    for (int r = 0; r < R; r++) total[r][p] = fma(found[r][p], factor, total[r][p]);
                }
            }
            WRITTEN_OUT
            for (int r = 0; r < R; r++) {
                WRITTEN_OUT
                for (int p = 0; p < OUTPUTS; p++) {
                    if (F::OFFSETS) {
                        total[r][p] = less_offsets(total[r][p], weight_at[p] + BLOCK_WEIGHTS + 64,
                                                   x_at[r] + BLOCK_WEIGHTS);
                    }
                }
                x_at[r] += X_NUMBERS;
            }
            for (int p = 0; p < OUTPUTS; p++) weight_at[p] += WEIGHT_NUMBERS;
        }
        WRITTEN_OUT
        for (int r = 0; r < R; r++) {
            WRITTEN_OUT
            for (int p = 0; p < OUTPUTS; p++) store(sums + r * SUMS_ROW + p * Vec::WIDTH, total[r][p]);
        }
    }
};

}  // namespace

#endif
