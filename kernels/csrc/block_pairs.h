// Codes of blocks as pairs of bfloat16, for CPUs that multiply these (AVX-512 BF16).
//
// A block's 256 weights are 16 groups of 16, each with one scale. Eight products of 32 numbers sum
// them so that lane 4 m + k holds the sum of group 4 k + m alone; the sixteen sums are then scaled
// together, and offsets are met by the sums of x over groups. Whole numbers up to 256 are exact in
// bfloat16, and so is every weight.
#pragma once

#include "blocks.h"

#if defined(__AVX512BF16__)

namespace {

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

// What up to 64 codes stand for.
template <class F>
struct Levels {
    alignas(64) bf16 values[64];
    constexpr Levels() : values() {
        for (int i = 0; i < 64; i++) {
            if constexpr (std::is_same_v<F, IQ4_NL>) values[i] = bfloat16_of(F::VALUES[i % 16]);
            else values[i] = bfloat16_of(i % F::LEVELS + F::FIRST);
        }
    }
};

// 32 codes, each the low byte of a word, as bfloat16; the high bytes are left out.
template <class F>
inline __m512i levels_of(__m512i words) {
    static constexpr Levels<F> LEVELS{};
    __m512i low = _mm512_load_si512(LEVELS.values);
    if constexpr (F::LEVELS == 64) {
        return _mm512_permutex2var_epi16(low, words, _mm512_load_si512(LEVELS.values + 32));
    }
    return _mm512_permutexvar_epi16(words, low);
}

// The codes of two runs.
template <class F, int R>
inline __m512i two_runs(const uint8_t* block) {
    if constexpr (std::is_same_v<F, Q4_K>) {  // the nibbles of the same bytes
        __m512i both = _mm512_broadcast_i64x4(_mm256_loadu_si256(
            reinterpret_cast<const __m256i*>(block + 16 + R / 2 * 32)));
        __m512i shifts = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
        return _mm512_and_si512(_mm512_srlv_epi16(both, shifts), _mm512_set1_epi8(15));
    }
    return _mm512_inserti64x4(
        _mm512_castsi256_si512(reinterpret_cast<__m256i>(F::template codes<R>(block))),
        reinterpret_cast<__m256i>(F::template codes<R + 1>(block)), 1);
}

// Those of two blocks of 32; a run that is not there has zeros.
template <class F, int R>
inline __m512i two_small(const uint8_t* block, int count) {
    __m256i nothing = _mm256_setzero_si256(), low = nothing, high = nothing;
    if (R < count) low = reinterpret_cast<__m256i>(F::template codes<0>(block + R * F::BYTES));
    if (R + 1 < count) {
        high = reinterpret_cast<__m256i>(F::template codes<0>(block + (R + 1) * F::BYTES));
    }
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// Bytes of 16 groups of 16 in their order become four vectors whose lane 4 m + k has four bytes of
// group 4 k + m.
inline void group_lanes(const __m512i* z, __m512i* to) {
    __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpackhi_epi32(z[0], z[1]);
    __m512i c = _mm512_unpacklo_epi32(z[2], z[3]), d = _mm512_unpackhi_epi32(z[2], z[3]);
    to[0] = _mm512_unpacklo_epi64(a, c);
    to[1] = _mm512_unpackhi_epi64(a, c);
    to[2] = _mm512_unpacklo_epi64(b, d);
    to[3] = _mm512_unpackhi_epi64(b, d);
}

// A number for each group, or for each run of two groups, in the order of the lanes.
template <bool HALVES>
inline __m512 in_lanes(__m512 numbers) {
    __m512i order = HALVES ? _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0)
                           : _mm512_set_epi32(7, 5, 3, 1, 7, 5, 3, 1, 6, 4, 2, 0, 6, 4, 2, 0);
    return _mm512_permutexvar_ps(order, numbers);
}

// The first numbers of blocks of 32 that lie next to each other, of float16.
template <class F>
inline __m512 halves_of(const uint8_t* blocks, int byte, int count) {
    __m128i found = _mm_setzero_si128();
    auto at = [&](int i) {
        uint16_t bits = 0;
        if (i < count) std::memcpy(&bits, blocks + i * F::BYTES + byte, 2);
        return static_cast<short>(bits);
    };
    found = _mm_set_epi16(at(7), at(6), at(5), at(4), at(3), at(2), at(1), at(0));
    return _mm512_castps256_ps512(_mm256_cvtph_ps(found));
}

template <class F>
struct CodeLanes {
    static constexpr int ROWS = 6;
    static constexpr int X_BYTES = 512 + 64;             // of a block: numbers, sums of groups
    static constexpr int WEIGHT_BYTES = 512 + 2 * 64;    // numbers, scales, offsets

    static int64_t x_bytes(int inputs) { return static_cast<int64_t>(inputs + BLOCK_WEIGHTS - 1) / BLOCK_WEIGHTS * X_BYTES; }
    static int64_t weight_bytes(int inputs) {
        return static_cast<int64_t>(inputs + BLOCK_WEIGHTS - 1) / BLOCK_WEIGHTS * WEIGHT_BYTES;
    }

    // Numbers of x in the order in which codes meet them; zeros behind the last.
    static void read_x(const bf16* x, int inputs, char* to) {
        for (int first = 0; first < inputs; first += BLOCK_WEIGHTS, to += X_BYTES) {
            alignas(64) bf16 block[BLOCK_WEIGHTS];
            int here = inputs - first < BLOCK_WEIGHTS ? inputs - first : BLOCK_WEIGHTS;
            std::memcpy(block, x + first, here * sizeof(bf16));
            std::memset(block + here, 0, (BLOCK_WEIGHTS - here) * sizeof(bf16));
            bf16* numbers = reinterpret_cast<bf16*>(to);
            float* sums = reinterpret_cast<float*>(to + 512);
            for (int lane = 0; lane < 16; lane++) {
                const bf16* group = block + 16 * (lane % 4 * 4 + lane / 4);
                float sum = 0.0f;
                for (int j = 0; j < 16; j += 4) {
                    bf16* pair = numbers + j / 4 * 64 + 2 * lane;
                    pair[0] = group[j];
                    pair[1] = group[j + 2];
                    pair[32] = group[j + 1];
                    pair[33] = group[j + 3];
                    sum += (to_float(group[j]) + to_float(group[j + 1])) +
                           (to_float(group[j + 2]) + to_float(group[j + 3]));
                }
                sums[lane] = sum;
            }
        }
    }

    static void decode(const uint8_t* row, int first, int inputs, char* to) {
        row += static_cast<int64_t>(first / F::NUMBERS) * F::BYTES;
        for (int at = 0; at < inputs; at += BLOCK_WEIGHTS, to += WEIGHT_BYTES) {
            auto keep = [&](int step, __m512i numbers) { _mm512_storeu_si512(to + step * 64, numbers); };
            auto [scale, offset] = decoded(row, inputs - at, keep);
            _mm512_storeu_ps(to + 512, scale);
            if (F::OFFSETS) _mm512_storeu_ps(to + 576, offset);
            row += BLOCK_WEIGHTS / F::NUMBERS * F::BYTES;
        }
    }

    struct Factors {
        __m512 scale, offset;  // of the lanes
    };

    // Calls `visit(step, 32 numbers)` for the eight steps of a block.
    template <class Visit>
    static Factors decoded(const uint8_t* block, int inputs, Visit visit) {
        __m512i z[4], lanes[4];
        Factors found{_mm512_setzero_ps(), _mm512_setzero_ps()};
        if constexpr (F::NUMBERS == RUN) {
            int count = inputs < BLOCK_WEIGHTS ? inputs / RUN : BLOCK_WEIGHTS / RUN;
            z[0] = two_small<F, 0>(block, count);
            z[1] = two_small<F, 2>(block, count);
            z[2] = two_small<F, 4>(block, count);
            z[3] = two_small<F, 6>(block, count);
            found.scale = in_lanes<false>(halves_of<F>(block, 0, count));
            if (F::OFFSETS) {
                __m512 offset = in_lanes<false>(halves_of<F>(block, 2, count));
                found.offset = _mm512_sub_ps(_mm512_setzero_ps(), offset);
            }
        } else {
            z[0] = two_runs<F, 0>(block);
            z[1] = two_runs<F, 2>(block);
            z[2] = two_runs<F, 4>(block);
            z[3] = two_runs<F, 6>(block);
            Scales scales;
            F::prepare(block, scales);
            if constexpr (F::HALVES) {
                found.scale = in_lanes<true>(_mm512_load_ps(scales.scale));
                if (F::OFFSETS) found.offset = in_lanes<true>(_mm512_load_ps(scales.offset));
            } else {
                found.scale = in_lanes<false>(_mm512_castps256_ps512(_mm256_load_ps(scales.scale)));
                if (F::OFFSETS) {
                    found.offset = in_lanes<false>(_mm512_castps256_ps512(_mm256_load_ps(scales.offset)));
                }
            }
        }
        group_lanes(z, lanes);
        WRITTEN_OUT
        for (int j = 0; j < 4; j++) {
            if constexpr (F::LEVELS == 256) {  // signed bytes
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

    static constexpr int FUSED_ROWS = 8;

    // R rows of x by one output whose weights are never stored: the sums of `tile`.
    template <int R>
    static void fused(const char* x, int64_t x_row, const uint8_t* row, int inputs, float* sums,
                      int64_t sums_row) {
        __m512 total[R];
        for (int r = 0; r < R; r++) total[r] = _mm512_setzero_ps();
        for (int at = 0; at < inputs; at += BLOCK_WEIGHTS, x += X_BYTES) {
            __m512 acc[R];
            for (int r = 0; r < R; r++) acc[r] = _mm512_setzero_ps();
            auto add = [&](int step, __m512i numbers) {
                WRITTEN_OUT
                for (int r = 0; r < R; r++) {
                    __m512i factor = _mm512_loadu_si512(x + r * x_row + step * 64);
                    acc[r] = _mm512_dpbf16_ps(acc[r], reinterpret_cast<__m512bh>(factor),
                                              reinterpret_cast<__m512bh>(numbers));
                }
            };
            auto [scale, offset] = decoded(row, inputs - at, add);
            for (int r = 0; r < R; r++) {
                total[r] = _mm512_fmadd_ps(acc[r], scale, total[r]);
                if (F::OFFSETS) {
                    __m512 sum = _mm512_loadu_ps(x + r * x_row + 512);
                    total[r] = _mm512_fnmadd_ps(offset, sum, total[r]);
                }
            }
            row += BLOCK_WEIGHTS / F::NUMBERS * F::BYTES;
        }
        for (int r = 0; r < R; r++) _mm512_storeu_ps(sums + r * sums_row, total[r]);
    }

    // As `PlainLanes::tile`; the sums stay in the L1 cache.
    template <int R>
    static void tile(const char* x, int64_t x_row, const char* weights, int64_t weight_row, int inputs,
                     bool begins, float* sums, int64_t sums_row) {
        if (begins) {
            for (int r = 0; r < R; r++) {
                for (int p = 0; p < 4; p++) _mm512_storeu_ps(sums + r * sums_row + p * 16, _mm512_setzero_ps());
            }
        }
        const char *x_at[R], *weight_at[4];
        for (int r = 0; r < R; r++) x_at[r] = x + r * x_row;
        for (int p = 0; p < 4; p++) weight_at[p] = weights + p * weight_row;
        for (int at = 0; at < inputs; at += BLOCK_WEIGHTS) {
            __m512 acc[R][4];
            for (int r = 0; r < R; r++) {
                for (int p = 0; p < 4; p++) acc[r][p] = _mm512_setzero_ps();
            }
            WRITTEN_OUT
            for (int step = 0; step < 8; step++) {
                __m512bh weight[4];
                for (int p = 0; p < 4; p++) {
                    weight[p] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(weight_at[p] + step * 64));
                }
                for (int r = 0; r < R; r++) {
                    __m512bh factor = reinterpret_cast<__m512bh>(_mm512_loadu_si512(x_at[r] + step * 64));
                    for (int p = 0; p < 4; p++) {
                        acc[r][p] = _mm512_dpbf16_ps(acc[r][p], factor, weight[p]);
                    }
                }
            }
            for (int p = 0; p < 4; p++) {
                __m512 scale = _mm512_loadu_ps(weight_at[p] + 512), offset;
                if (F::OFFSETS) offset = _mm512_loadu_ps(weight_at[p] + 576);
                for (int r = 0; r < R; r++) {
                    float* sum = sums + r * sums_row + p * 16;
                    __m512 found = _mm512_fmadd_ps(acc[r][p], scale, _mm512_loadu_ps(sum));
                    if (F::OFFSETS) found = _mm512_fnmadd_ps(offset, _mm512_loadu_ps(x_at[r] + 512), found);
                    _mm512_storeu_ps(sum, found);
                }
            }
            for (int r = 0; r < R; r++) x_at[r] += X_BYTES;
            for (int p = 0; p < 4; p++) weight_at[p] += WEIGHT_BYTES;
        }
    }
};

}  // namespace

#endif
