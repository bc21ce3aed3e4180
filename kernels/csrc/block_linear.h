// Linear layers over weights in blocks (blocks.h), which stay in their file's layout.
//
// The weights of some outputs are decoded into a cache and met there by all rows; for few rows they
// stay in registers. Codes meet x in bfloat16 as whole numbers: pairs of 16 bits on x86 (block_pairs.h
// with AVX-512, block_words.h with AVX2), bytes on aarch64 with dot products (block_dots.h). On x86
// they meet x in float32 in that dtype (block_singles.h). Products are summed by groups, then scaled
// in float32. Formats without codes, and other CPUs: weights and x in one dtype. No weight is rounded
// but those of formats with 16 or 32 bits.
// Each result is summed over its inputs in lanes, and these in one order: a row's bits do not depend
// on the other rows or on the number of threads.
#pragma once

#include "block_dots.h"
#include "block_pairs.h"
#include "block_singles.h"
#include "block_words.h"
#include "blocks.h"
#include "linear.h"

namespace {

constexpr int TOGETHER = 4;        // outputs whose sums stay in registers
constexpr int FUSED_X = 24 << 10;  // bytes of x that stay in the L1 cache for few rows
constexpr int BLOCK_ROWS = 128;  // that meet all weights, so that x stays in the L2 cache

// Numbers of x and weights as they lie, `Vec::WIDTH` float32 or 32 bfloat16 at a time.
template <class F, class Wide>
struct PlainLanes {
    using Format = F;
    using X = typename Wide::X;
    static constexpr int ROWS = Wide::ROWS, FUSED_ROWS = 0;
    static int64_t x_bytes(int inputs) { return static_cast<int64_t>(inputs) * sizeof(X); }
    static constexpr int64_t WEIGHT_ROW = MOST_DECODED * sizeof(X);

    template <class Number>
    static void read_x(const Number* x, int inputs, char* to) {
        copy_row(x, inputs, reinterpret_cast<X*>(to));
    }

    static void decode(const uint8_t* row, int64_t ahead, int first, int inputs, char* to) {
        fetch(row + ahead + row_bytes<F>(first), row_bytes<F>(inputs));
        decode_blocks<F>(row, first, inputs, reinterpret_cast<X*>(to));
    }

    // R rows of x by `TOGETHER` outputs, over some inputs; the sums begin at zero or go on.
    template <int R>
    static void tile(const char* x, int64_t x_row, const char* weights, int inputs, bool begins,
                     float* sums) {
        Vec acc[R][TOGETHER];
        const X *x_at[R], *weight_at[TOGETHER];
        for (int p = 0; p < TOGETHER; p++) {
            weight_at[p] = reinterpret_cast<const X*>(weights + p * WEIGHT_ROW);
        }
        for (int r = 0; r < R; r++) {
            x_at[r] = reinterpret_cast<const X*>(x + r * x_row);
            for (int p = 0; p < TOGETHER; p++) {
                acc[r][p] = begins ? set1(0.0f) : load(sums + r * SUMS_ROW + p * Vec::WIDTH);
            }
        }
        for (int i = 0; i < inputs; i += Wide::STEP) {
            typename Wide::Part weight[TOGETHER];
            for (int p = 0; p < TOGETHER; p++) weight[p] = Wide::part(weight_at[p] + i);
            for (int r = 0; r < R; r++) {
                typename Wide::Part factor = Wide::part(x_at[r] + i);
                for (int p = 0; p < TOGETHER; p++) {
                    acc[r][p] = Wide::add(acc[r][p], factor, weight[p]);
                }
            }
        }
        for (int r = 0; r < R; r++) {
            for (int p = 0; p < TOGETHER; p++) store(sums + r * SUMS_ROW + p * Vec::WIDTH, acc[r][p]);
        }
    }
};

struct WideSingles {
    using X = float;
    static constexpr int STEP = Vec::WIDTH, ROWS = Vec::WIDTH == 8 ? 2 : 5;
    using Part = Vec;
    static Part part(const float* p) { return load(p); }
    static Vec add(Vec sum, Part x, Part weight) { return fma(x, weight, sum); }
};

#if defined(__x86_64__)

// The sums of the lanes of four vectors.
inline __m128 sum_of_four(const float* from) {
    Vec a = load(from), b = load(from + Vec::WIDTH), c = load(from + 2 * Vec::WIDTH), d = load(from + 3 * Vec::WIDTH);
#if defined(__AVX512F__)
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c.v, d.v), _mm512_unpackhi_ps(c.v, d.v));
    __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m256 eight = halves_sum({_mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high))});
#else
    __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a.v, b.v), _mm256_unpackhi_ps(a.v, b.v));
    __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c.v, d.v), _mm256_unpackhi_ps(c.v, d.v));
    __m256d low = _mm256_unpacklo_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
    __m256d high = _mm256_unpackhi_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
    __m256 eight = _mm256_add_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high));
#endif
    return _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
}

#endif

// The sums of the lanes of some vectors, at most as many as a vector has lanes; others are anything.
inline Vec sums_of(const float* from, int count) {
#if defined(__AVX512F__)
    __m512 found = _mm512_castps128_ps512(sum_of_four(from));
    if (count > 4) found = _mm512_insertf32x4(found, sum_of_four(from + 4 * 16), 1);
    if (count > 8) found = _mm512_insertf32x4(found, sum_of_four(from + 8 * 16), 2);
    if (count > 12) found = _mm512_insertf32x4(found, sum_of_four(from + 12 * 16), 3);
    return {found};
#elif defined(__x86_64__)
    __m256 found = _mm256_castps128_ps256(sum_of_four(from));
    return {count > 4 ? _mm256_insertf128_ps(found, sum_of_four(from + 4 * 8), 1) : found};
#else
    float found[4];
    for (int i = 0; i < 4; i++) found[i] = i < count ? sum(load(from + i * 4)) : 0.0f;
    return load(found);
#endif
}

template <class Lanes, int R>
inline void tile_of(int rows, const char* x, int64_t x_row, const char* weights, int inputs, bool begins,
                    float* sums) {
    if constexpr (R > 0) {
        if (rows == R) return Lanes::template tile<R>(x, x_row, weights, inputs, begins, sums);
        tile_of<Lanes, R - 1>(rows, x, x_row, weights, inputs, begins, sums);
    }
}

template <class Lanes, int R>
inline void fused_of(int rows, const char* x, int64_t x_row, const uint8_t* row, int64_t ahead, int inputs,
                     bool begins, float* sums) {
    if constexpr (R > 0) {
        if (rows == R) return Lanes::template fused<R>(x, x_row, row, ahead, inputs, begins, sums);
        fused_of<Lanes, R - 1>(rows, x, x_row, row, ahead, inputs, begins, sums);
    }
}

template <class Number>
void block_results(const LinearJob& job, const float* sums, int first_row, int rows, int first, int count) {
    for (int r = 0; r < rows; r++) {
        Number* to = static_cast<Number*>(job.out) + (first_row + r) * job.out_row + first;
        for (int o = 0; o < count; o += Vec::WIDTH) {
            int here = count - o < Vec::WIDTH ? count - o : Vec::WIDTH;
            Vec value = sums_of(sums + r * SUMS_ROW + o * Vec::WIDTH, here);
            if (job.bias) value = value + load_first(job.bias + first + o, here, 0.0f);
            store_first(to + o, here, value);
        }
    }
}

template <class Lanes, class Number>
void block_groups(const LinearJob& job, int part, int parts, Scratch* scratch) {
    // few rows read each output's weights in their order, many keep those of more outputs in L2
    int group = job.rows > Lanes::FUSED_ROWS && job.rows <= 2 * Lanes::ROWS ? TOGETHER : DECODED;
    int64_t block_bytes = Lanes::x_bytes(BLOCK_WEIGHTS) * (job.rows ? job.rows : 1);
    int fused_inputs = (block_bytes < FUSED_X ? static_cast<int>(FUSED_X / block_bytes) : 1) * BLOCK_WEIGHTS;
    int blocks = (job.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    int most_rows = blocks ? (job.rows + blocks - 1) / blocks : 0;
    int64_t sums_bytes = most_rows * SUMS_ROW * 4, weight_bytes = group * Lanes::WEIGHT_ROW;
    int64_t x_row = Lanes::x_bytes(job.inputs);
    char* memory = static_cast<char*>(
        scratch->take(scratch, (sums_bytes + weight_bytes + 63) / 64 * 64 + most_rows * x_row));
    float* sums = reinterpret_cast<float*>(memory);
    char *weights = memory + sums_bytes, *x = memory + (sums_bytes + weight_bytes + 63) / 64 * 64;
    int groups = (job.outputs + DECODED - 1) / DECODED;
    int first = static_cast<int>(static_cast<int64_t>(groups) * part / parts) * DECODED;
    int end = static_cast<int>(static_cast<int64_t>(groups) * (part + 1) / parts) * DECODED;
    end = end < job.outputs ? end : job.outputs;
    for (int row = 0; row < job.rows; row += most_rows) {
        int rows = job.rows - row < most_rows ? job.rows - row : most_rows;
        for (int r = 0; r < rows; r++) {
            const Number* from = static_cast<const Number*>(job.x) + (row + r) * job.x_row;
            Lanes::read_x(from, job.inputs, x + r * x_row);
        }
        for (int output = first; output < end; output += group) {
            int count = end - output < group ? end - output : group;
            const uint8_t* from = static_cast<const uint8_t*>(job.packed) + output * job.packed_row;
            // whose weights are fetched meanwhile: no CPU sees them coming, a part of a row each;
            // none near the end, where little may be read behind a row
            int64_t ahead = output + 2 * group <= job.outputs ? group * job.packed_row : 0;
            if (job.rows <= Lanes::FUSED_ROWS) {
                for (int input = 0; input < job.inputs; input += fused_inputs) {
                    int inputs = job.inputs - input < fused_inputs ? job.inputs - input : fused_inputs;
                    for (int o = 0; o < count; o++) {
                        fused_of<Lanes, Lanes::FUSED_ROWS>(
                            rows, x + Lanes::x_bytes(input), x_row,
                            from + o * job.packed_row + row_bytes<typename Lanes::Format>(input), ahead, inputs, input == 0,
                            sums + o * Vec::WIDTH);
                    }
                }
                block_results<Number>(job, sums, row, rows, output, count);
                continue;
            }
            for (int input = 0; input < job.inputs; input += MOST_DECODED) {
                int inputs = job.inputs - input < MOST_DECODED ? job.inputs - input : MOST_DECODED;
                for (int o = 0; o < count; o++) {
                    Lanes::decode(from + o * job.packed_row, ahead, input, inputs, weights + o * Lanes::WEIGHT_ROW);
                }
                for (int at = 0; at < rows;) {
                    int tiles = (rows - at + Lanes::ROWS - 1) / Lanes::ROWS;
                    int some = (rows - at + tiles - 1) / tiles;
                    for (int o = 0; o < count; o += TOGETHER) {  // past the last: room, never stored
                        tile_of<Lanes, Lanes::ROWS>(
                            some, x + at * x_row + Lanes::x_bytes(input), x_row,
                            weights + o * Lanes::WEIGHT_ROW, inputs, input == 0, sums + at * SUMS_ROW + o * Vec::WIDTH);
                    }
                    at += some;
                }
            }
            block_results<Number>(job, sums, row, rows, output, count);
        }
    }
}

#if defined(__AMX_BF16__)

// CPUs with tiles multiply pairs of whole numbers faster than pairs of bfloat16.
void block_linear(const LinearJob& job, int32_t part, int32_t parts, Scratch* scratch) {
    with_format(job.packed_number, [&](auto format) {
        const auto& faster = PLAIN<decltype(format)> ? arbor::avx512_bf16_kernels : arbor::avx512_vnni_kernels;
        faster.linear(job, part, parts, scratch);
    });
}

#else

#if defined(__AVX512BF16__)
template <class F, class Number>
using Lanes = std::conditional_t<PLAIN<F>, PlainLanes<F, WidePairs>, CodeLanes<F>>;
#elif defined(__x86_64__)
#if defined(__AVX512F__)
template <class F>
using WholeLanes = CodeLanes<F>;
#else
template <class F>
using WholeLanes = WordLanes<F>;
#endif
template <class F, class Number>
using CodedLanes = std::conditional_t<std::is_same_v<Number, bf16>, WholeLanes<F>, SingleLanes<F>>;
template <class F, class Number>
using Lanes = std::conditional_t<PLAIN<F>, PlainLanes<F, WideSingles>, CodedLanes<F, Number>>;
#elif defined(__ARM_FEATURE_DOTPROD)
template <class F, class Number>
using Lanes = std::conditional_t<PLAIN<F> || std::is_same_v<Number, float>, PlainLanes<F, WideSingles>, DotLanes<F>>;
#else
template <class F, class Number>
using Lanes = PlainLanes<F, WideSingles>;
#endif

// A set that only adds instructions for bfloat16 leaves float32 to the one it is built on.
#if defined(__AVX512BF16__) || defined(__AVX512VNNI__)
const arbor::Kernels* const OF_FLOAT32 = &arbor::avx512_kernels;
#elif defined(__AVXVNNI__)
const arbor::Kernels* const OF_FLOAT32 = &arbor::avx2_kernels;
#else
#define ARBOR_OWN_FLOAT32
#endif

void block_linear(const LinearJob& job, int32_t part, int32_t parts, Scratch* scratch) {
#if !defined(ARBOR_OWN_FLOAT32)
    if (job.number == arbor::FLOAT32) return OF_FLOAT32->linear(job, part, parts, scratch);
#endif
    with_format(job.packed_number, [&](auto format) {
        using F = decltype(format);
#if defined(ARBOR_OWN_FLOAT32)
        if (job.number == arbor::FLOAT32) return block_groups<Lanes<F, float>, float>(job, part, parts, scratch);
#endif
        block_groups<Lanes<F, bf16>, bf16>(job, part, parts, scratch);
    });
}

#endif

// Rows of a matrix in blocks as float32 or bfloat16.
inline void decode_rows(const DecodeJob& job) {
    with_format(job.packed_number, [&](auto format) {
        using F = decltype(format);
        for (int64_t i = 0; i < job.rows; i++) {
            const uint8_t* from = static_cast<const uint8_t*>(job.packed) + job.ids[i] * job.packed_row;
            int64_t at = i * job.inputs;
            if (job.number == arbor::FLOAT32) {
                decode_blocks<F>(from, 0, job.inputs, static_cast<float*>(job.out) + at);
            } else {
                decode_blocks<F>(from, 0, job.inputs, static_cast<bf16*>(job.out) + at);
            }
        }
    });
}

inline void any_linear(const LinearJob& job, int32_t part, int32_t parts, Scratch* scratch) {
    if (job.packed_number >= arbor::BLOCKS) return block_linear(job, part, parts, scratch);
    linear(job, part, parts, scratch);
}

}  // namespace
