// The tiles of AMX, shaped alike for all products of bfloat16.
#pragma once

#include <immintrin.h>

#include <cstdint>

#if defined(__AMX_BF16__)

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

}  // namespace

#endif
