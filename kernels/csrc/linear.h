// Linear layers over packed weights, which are read once and in order.
//
// A packed weight is a list of panels of 16 outputs: in float32 [panels][inputs][16], in bfloat16
// [panels][pairs of inputs][16][2], padded with zeros to whole panels and to 32 inputs. The second
// form is what the tiles of AMX and the pairs of AVX-512 BF16 read.
// Every result is summed over its inputs in order, whatever the number of rows and wherever sums are
// stored in between: a row's bits do not depend on the other rows or on the number of threads.
#pragma once

#include "amx.h"
#include "native.h"
#include "vector.h"

namespace {

using arbor::DecodeJob;
using arbor::LinearJob;
using arbor::Scratch;

constexpr int PANEL = 16;
constexpr int VECS = PANEL / Vec::WIDTH;     // vectors of a panel
constexpr int INPUTS = 128;                  // inputs whose weights stay in the L1 cache
constexpr int PANELS = Vec::WIDTH == 16 ? 4 : 1;  // of a group: one part of a job
// From so many rows on, storing and loading the sums of a block takes longer than weights from L2.
constexpr int MANY_ROWS = Vec::WIDTH == 16 ? 128 : 1 << 30;  // measured with AVX-512 alone
constexpr int AHEAD = 8192;  // bytes of weights on their way to L2 while sums stay in registers
constexpr int MOST_ROWS = 512;  // that meet all weights, so that x and sums stay in the L2 cache

// A dot adds what a step of x, one number or two of each row, gives with the weights of a panel.

// float32: one input at a time.
struct SingleDot {
    using Number = float;  // of the job
    using X = float;       // in which x is read
    static constexpr int STEP = 1;
    static constexpr int ROWS = Vec::WIDTH == 4 ? 5 : 6;  // whose sums stay in registers

    template <int R, int P>
    static void add(Vec (&acc)[R][P][VECS], int p, const float* const* x, int at, const char* weight) {
        for (int r = 0; r < R; r++) {
            Vec factor = set1(x[r][at]);
            for (int c = 0; c < VECS; c++) {
                const float* from = reinterpret_cast<const float*>(weight) + c * Vec::WIDTH;
                acc[r][p][c] = fma(factor, load(from), acc[r][p][c]);
            }
        }
    }
};

// bfloat16: two inputs at a time.
struct PairDot {
    using Number = bf16;
    static constexpr int STEP = 2;
    static constexpr int ROWS = Vec::WIDTH == 16 ? 6 : 5;

#if defined(HAS_PAIRS)
    using X = bf16;

    template <int R, int P>
    static void add(Vec (&acc)[R][P][VECS], int p, const bf16* const* x, int at, const char* weight) {
        for (int r = 0; r < R; r++) {
            Pair factors = pair_of(x[r] + at);
            for (int c = 0; c < VECS; c++) {
                acc[r][p][c] = fma(factors, weight + c * Vec::WIDTH * 4, acc[r][p][c]);
            }
        }
    }
#else
    using X = float;  // widened once, not for every panel

    // One half of the pairs after the other, so that sums and weights fit into the registers.
    template <int R, int P>
    static void add(Vec (&acc)[R][P][VECS], int p, const float* const* x, int at, const char* weight) {
        for (int half = 0; half < 2; half++) {
            Vec numbers[VECS];
            for (int c = 0; c < VECS; c++) {
                const char* pairs = weight + c * Vec::WIDTH * 4;
                numbers[c] = half ? odd_of(pairs) : even_of(pairs);
            }
            for (int r = 0; r < R; r++) {
                Vec factor = set1(x[r][at + half]);
                for (int c = 0; c < VECS; c++) {
                    acc[r][p][c] = fma(factor, numbers[c], acc[r][p][c]);
                }
            }
        }
    }
#endif
};

inline int64_t steps_of(const LinearJob& job) {
    return job.packed_number == arbor::BFLOAT16 ? (job.inputs + 31) / 32 * 16 : job.inputs;
}

// A block of inputs: so many steps of x and of panels that lie `panel_bytes` apart.
struct InputBlock {
    int64_t panel_bytes;
    int steps;
    bool begins;    // the sums begin at zero here, else they go on
    int out_row;    // numbers from one row of sums to the next
    int64_t ahead;  // bytes from a step's weights to those to fetch meanwhile
};

// out[r][16 outputs of P panels] += x[r] times the panels.
template <class Dot, int R, int P>
void linear_tile(const typename Dot::X* const* x, const char* weights, const InputBlock& block,
                 float* out) {
    int out_row = block.out_row;
    Vec acc[R][P][VECS];
    for (int r = 0; r < R; r++) {
        for (int p = 0; p < P; p++) {
            for (int c = 0; c < VECS; c++) {
                const float* from = out + r * out_row + p * PANEL + c * Vec::WIDTH;
                acc[r][p][c] = block.begins ? set1(0.0f) : load(from);
            }
        }
    }
    for (int step = 0; step < block.steps; step++) {
        for (int p = 0; p < P; p++) {
            const char* weight = weights + p * block.panel_bytes + step * 64;
            prefetch_far(weight + block.ahead);
            if (Vec::WIDTH != 8) prefetch(weight + 1024);  // AVX2 has no loads to spare
            Dot::add(acc, p, x, step * Dot::STEP, weight);
        }
    }
    for (int r = 0; r < R; r++) {
        for (int p = 0; p < P; p++) {
            for (int c = 0; c < VECS; c++) {
                store(out + r * out_row + p * PANEL + c * Vec::WIDTH, acc[r][p][c]);
            }
        }
    }
}

template <class Dot, int R, int P>
void linear_rows(int rows, const typename Dot::X* const* x, const char* weights, const InputBlock& block,
                 float* out) {
    if constexpr (R > 0) {
        if (rows == R) return linear_tile<Dot, R, P>(x, weights, block, out);
        linear_rows<Dot, R - 1, P>(rows, x, weights, block, out);
    }
}

// Sums [rows][PANELS * 16] of a group as results: with the bias, in the job's numbers.
template <class Number>
void finish(const LinearJob& job, const float* sums, int sums_row, int first_row, int rows,
            int first) {
    int count = job.outputs - first;
    count = count < sums_row ? count : sums_row;
    for (int r = 0; r < rows; r++) {
        Number* to = static_cast<Number*>(job.out) +
                     static_cast<int64_t>(first_row + r) * job.out_row + first;
        for (int o = 0; o < count; o += Vec::WIDTH) {
            Vec value = load(sums + r * sums_row + o);
            int here = count - o;
            if (here >= Vec::WIDTH) {
                if (job.bias) value = value + load(job.bias + first + o);
                store(to + o, value);
            } else {
                if (job.bias) value = value + load_first(job.bias + first + o, here, 0.0f);
                store_first(to + o, here, value);
            }
        }
    }
}

int32_t linear_parts(const LinearJob& job) {
    return (job.outputs + PANELS * PANEL - 1) / (PANELS * PANEL);
}

inline void copy_row(const float* from, int64_t count, float* to) {
    std::memcpy(to, from, sizeof(float) * count);
}

inline void copy_row(const bf16* from, int64_t count, bf16* to) {
    std::memcpy(to, from, sizeof(bf16) * count);
}

inline void copy_row(const bf16* from, int64_t count, float* to) {
    int64_t i = 0;
    for (; i + Vec::WIDTH <= count; i += Vec::WIDTH) store(to + i, load(from + i));
    for (; i < count; i++) to[i] = to_float(from[i]);
}

// Some rows of x as they are read: with zeros behind them where whole steps go past the last input.
// They are copied to `room` unless they lie in memory like that.
template <class Number, class X>
const X* rows_of(const LinearJob& job, int first_row, int rows, int64_t width, X* room, int64_t* row) {
    const Number* x = static_cast<const Number*>(job.x) + first_row * job.x_row;
    *row = job.x_row;
    if constexpr (sizeof(Number) == sizeof(X)) {
        if (width == job.inputs) return x;
    }
    *row = width;
    for (int r = 0; r < rows; r++) {
        copy_row(x + r * job.x_row, job.inputs, room + r * width);
        std::memset(room + r * width + job.inputs, 0, sizeof(X) * (width - job.inputs));
    }
    return room;
}

// Some rows of x times a block of the first panels, divided evenly into tiles; the last rows fetch what
// lies `ahead`.
template <class Dot>
inline void tiled_rows(int rows, const typename Dot::X* x, int64_t x_row, int panels,
                            const char* weights, InputBlock block, float* sums) {
    constexpr int ROWS = Dot::ROWS;
    int64_t ahead = block.ahead;
    for (int row = 0, tiles = (rows + ROWS - 1) / ROWS; row < rows; tiles--) {
        int together = (rows - row + tiles - 1) / tiles;
        const typename Dot::X* x_at[ROWS];
        for (int r = 0; r < together; r++) x_at[r] = x + (row + r) * x_row;
        float* out = sums + static_cast<int64_t>(row) * block.out_row;
        block.ahead = tiles == 1 ? ahead : 0;
        if (panels == PANELS) {
            linear_rows<Dot, ROWS, PANELS>(together, x_at, weights, block, out);
        } else {
            for (int p = 0; p < panels; p++) {
                linear_rows<Dot, ROWS, 1>(
                    together, x_at, weights + p * block.panel_bytes, block, out + p * PANEL);
            }
        }
        row += together;
    }
}

// Some rows of x, which begin at `x`, times the panels of a part.
template <class Dot>
void linear_block(const LinearJob& job, const typename Dot::X* x, int64_t x_row, int first_row,
                  int rows, int first_group, int end_group, float* sums) {
    constexpr int OUT_ROW = PANELS * PANEL, BLOCK = INPUTS / Dot::STEP, ROWS = Dot::ROWS;
    int64_t steps = steps_of(job), panel_bytes = steps * 64;
    int panels = (job.outputs + PANEL - 1) / PANEL;
    // few and many rows keep their sums in registers from the first input to the last
    bool whole = rows <= ROWS || rows >= MANY_ROWS;
    int64_t block = whole ? steps : BLOCK;
    for (int group = first_group; group < end_group; group++) {
        int here = panels - group * PANELS < PANELS ? panels - group * PANELS : PANELS;
        const char* weights = static_cast<const char*>(job.packed) + group * PANELS * panel_bytes;
        for (int64_t step = 0; step < steps; step += block) {
            int some = static_cast<int>(steps - step < block ? steps - step : block);
            // the last rows of a block fetch the next one, of these panels or of the next ones
            int64_t next = step + block < steps ? block * 64 : PANELS * panel_bytes - step * 64;
            InputBlock inputs{panel_bytes, some, step == 0, OUT_ROW, whole ? AHEAD : next};
            tiled_rows<Dot>(rows, x + step * Dot::STEP, x_row, here, weights + step * 64,
                            inputs, sums);
        }
        finish<typename Dot::Number>(job, sums, OUT_ROW, first_row, rows, group * OUT_ROW);
    }
}

template <class Dot>
void linear_groups(const LinearJob& job, int part, int parts, Scratch* scratch) {
    using X = typename Dot::X;
    int64_t width = steps_of(job) * Dot::STEP;
    int blocks = (job.rows + MOST_ROWS - 1) / MOST_ROWS;
    int most_rows = blocks ? (job.rows + blocks - 1) / blocks : 0;  // blocks of about one size
    int64_t sums_bytes = static_cast<int64_t>(most_rows) * PANELS * PANEL * 4;
    int64_t x_bytes = most_rows * width * static_cast<int64_t>(sizeof(X));
    char* memory = static_cast<char*>(scratch->take(scratch, sums_bytes + x_bytes));
    float* sums = reinterpret_cast<float*>(memory);
    X* room = reinterpret_cast<X*>(memory + sums_bytes);
    int groups = linear_parts(job);
    int first_group = static_cast<int>(static_cast<int64_t>(groups) * part / parts);
    int end_group = static_cast<int>(static_cast<int64_t>(groups) * (part + 1) / parts);
    for (int row = 0; row < job.rows; row += most_rows) {
        int rows = job.rows - row < most_rows ? job.rows - row : most_rows;
        int64_t x_row;
        const X* x = rows_of<typename Dot::Number>(job, row, rows, width, room, &x_row);
        linear_block<Dot>(job, x, x_row, row, rows, first_group, end_group, sums);
    }
}

#if defined(__AMX_BF16__)

// Steps of a block whose weights for two panels (32 KiB) stay in the L1 cache, and the steps up to
// which that is faster for more than MANY_TILE_ROWS rows: longer rows of x leave the L2 cache.
constexpr int TILE_STEPS = 256, MOST_TILE_STEPS = 512;
constexpr int MANY_TILE_ROWS = 64;

// Up to 32 rows of x by two panels, over some steps; the sums begin at zero or go on.
inline void tile_products(const bf16* x, int64_t x_row, int rows, const char* first,
                          const char* second, int64_t steps, bool begins, float* sums) {
    bool lower = rows > 16;
    if (begins) clear_sums();
    else load_sums(sums, lower);
    for (int64_t step = 0; step < steps; step += 16) {
        const char* next = first + step * 64 + 2048;
        const char* next_second = second + step * 64 + 2048;
        for (int i = 0; i < 1024; i += 64) {
            prefetch(next + i);
            prefetch(next_second + i);
        }
        add_products(x + step * 2, x_row, lower, first + step * 64, second + step * 64);
    }
    store_sums(sums, lower);
}

inline void linear_tiles(const LinearJob& job, int part, int parts, Scratch* scratch) {
    int64_t steps = steps_of(job), panel_bytes = steps * 64, width = steps * 2;
    bool blocks = job.rows > MANY_TILE_ROWS && steps <= MOST_TILE_STEPS;
    int64_t block = blocks ? TILE_STEPS : steps;
    int64_t sums_bytes = static_cast<int64_t>(job.rows + 31) / 32 * 32 * 32 * 4;
    char* memory = static_cast<char*>(scratch->take(scratch, sums_bytes + job.rows * width * 2));
    float* sums = reinterpret_cast<float*>(memory);
    int64_t x_row;
    bf16* room = reinterpret_cast<bf16*>(memory + sums_bytes);
    const bf16* x = rows_of<bf16>(job, 0, job.rows, width, room, &x_row);
    int panels = (job.outputs + PANEL - 1) / PANEL, pairs = (panels + 1) / 2;
    int first = static_cast<int>(static_cast<int64_t>(pairs) * part / parts);
    int end = static_cast<int>(static_cast<int64_t>(pairs) * (part + 1) / parts);
    int shaped = 0;
    for (int pair = first; pair < end; pair++) {
        const char* weights = static_cast<const char*>(job.packed) + 2 * pair * panel_bytes;
        const char* second = 2 * pair + 1 < panels ? weights + panel_bytes : weights;
        for (int64_t step = 0; step < steps; step += block) {
            int64_t some = steps - step < block ? steps - step : block;
            for (int row = 0; row < job.rows; row += 32) {
                int rows = job.rows - row < 32 ? job.rows - row : 32;
                if (rows != shaped) shape_tiles(shaped = rows);
                tile_products(x + row * x_row + step * 2, x_row, rows, weights + step * 64,
                              second + step * 64, some, step == 0, sums + row * 32);
            }
        }
        finish<bf16>(job, sums, 32, 0, job.rows, 32 * pair);
    }
    release_tiles();
}

#endif

void linear(const LinearJob& job, int32_t part, int32_t parts, Scratch* scratch) {
    if (job.number == arbor::FLOAT32) return linear_groups<SingleDot>(job, part, parts, scratch);
#if defined(__AMX_BF16__)
    linear_tiles(job, part, parts, scratch);
#else
    linear_groups<PairDot>(job, part, parts, scratch);
#endif
}

}  // namespace
