// The tiles of AMX, shaped alike for all products of bfloat16.
#pragma once

#if defined(__AMX_BF16__)

#include <immintrin.h>

#include <cstdint>

#include "number.h"

namespace {

// Tiles 0, 1: sums of up to 16 rows for 2 x 16 columns; 2, 3: of the next 16 rows; 4, 5: these rows
// of the left matrix; 6, 7: columns of the right one. A product is 16 rows x 32 x 16 columns.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {0};
    uint16_t bytes[16] = {0};
    uint8_t rows[16] = {0};
};

inline void shape_tiles(int rows) {
    TileShapes shapes;
    int upper = rows < 16 ? rows : 16, lower = rows - upper;
    const int tile_rows[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
    for (int i = 0; i < 8; i++) {
        shapes.rows[i] = static_cast<uint8_t>(tile_rows[i] ? tile_rows[i] : 1);
        shapes.bytes[i] = 64;
    }
    _tile_loadconfig(&shapes);
}

inline void release_tiles() { _tile_release(); }

// Sums lie as rows of 32 numbers. `lower`: there are more than 16 rows.
constexpr int SUMS_BYTES = 32 * 4;

inline void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

inline void load_sums(const float* sums, bool lower) {
    _tile_loadd(0, sums, SUMS_BYTES);
    _tile_loadd(1, sums + 16, SUMS_BYTES);
    if (lower) {
        _tile_loadd(2, sums + 16 * 32, SUMS_BYTES);
        _tile_loadd(3, sums + 16 * 32 + 16, SUMS_BYTES);
    }
}

inline void store_sums(float* sums, bool lower) {
    _tile_stored(0, sums, SUMS_BYTES);
    _tile_stored(1, sums + 16, SUMS_BYTES);
    if (lower) {
        _tile_stored(2, sums + 16 * 32, SUMS_BYTES);
        _tile_stored(3, sums + 16 * 32 + 16, SUMS_BYTES);
    }
}

// Adds the products of 32 numbers of each row, `x_row` apart, with two times 16 columns of pairs.
inline void add_products(const bf16* x, int64_t x_row, bool lower, const void* first,
                         const void* second) {
    _tile_loadd(4, x, x_row * 2);
    _tile_loadd(6, first, 64);
    _tile_loadd(7, second, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (lower) {
        _tile_loadd(5, x + 16 * x_row, x_row * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

}  // namespace

#endif
