// 8-bit KV: a head of D channels as D codes, then a float16 scale for each group of 32 channels.
//
// As kernels/int8.py, which says why: a scale is the largest magnitude / 127, rounded up to float16,
// a code the number / scale, rounded to even. Here D is a multiple of 16. Numbers are decoded
// exactly, code * scale in float32, and a head's bits depend on that head alone.
#pragma once

#include "native.h"
#include "vector.h"

namespace {

using arbor::StoreJob;

constexpr int GROUP = 32;       // as in kernels/int8.py
constexpr float MOST_CODE = 127.0f;
constexpr uint16_t INFINITE = 0x7c00, NO_SCALE = 0x7e00;  // and NaN

inline int stored_width(int dim) { return dim + 2 * ((dim + GROUP - 1) / GROUP); }

inline void decode_head(const int8_t* stored, int dim, float* to) {
    for (int group = 0; group < dim; group += GROUP) {
        uint16_t bits;
        std::memcpy(&bits, stored + dim + 2 * (group / GROUP), 2);
        Vec scale = set1(half_to_float(bits));
        int end = group + GROUP < dim ? group + GROUP : dim;
        for (int d = group; d < end; d += Vec::WIDTH) store(to + d, load(stored + d) * scale);
    }
}

// The scale of numbers that are not all finite: infinite, unless there is a NaN.
template <class Number>
uint16_t scale_without_codes(const Number* x, int count) {
    for (int i = 0; i < count; i++) {
        if (to_float(x[i]) != to_float(x[i])) return NO_SCALE;
    }
    return INFINITE;
}

template <class Number>
void encode_head(const Number* x, int dim, int8_t* to) {
    for (int group = 0; group < dim; group += GROUP) {
        int end = group + GROUP < dim ? group + GROUP : dim;
        Vec most = set1(0.0f), nothing = set1(0.0f);  // NaN where a number is not finite
        for (int d = group; d < end; d += Vec::WIDTH) {
            Vec number = load(x + d);
            most = max(most, magnitude(number));
            nothing = nothing + (number - number);
        }
        bool finite = sum(nothing) == 0.0f;
        uint16_t bits = finite ? half_above(largest(most) / MOST_CODE)
                               : scale_without_codes(x + group, end - group);
        std::memcpy(to + dim + 2 * (group / GROUP), &bits, 2);
        float scale = half_to_float(bits);
        if (!(scale > 0.0f) || scale > 65504.0f) {  // zeros, or nothing that a scale can hold
            std::memset(to + group, 0, static_cast<size_t>(end - group));
            continue;
        }
        for (int d = group; d < end; d += Vec::WIDTH) store(to + d, load(x + d) / set1(scale));
    }
}

template <class Number>
void store_heads(const StoreJob& job) {
    for (int row = 0; row < job.rows; row++) {
        for (int head = 0; head < job.heads; head++) {
            const Number* x =
                static_cast<const Number*>(job.x) + row * job.x_row + head * job.x_head;
            int8_t* to = job.pool + job.slots[row] * job.pool_slot + head * job.pool_head;
            encode_head(x, job.dim, to);
        }
    }
}

void store_int8(const StoreJob& job) {
    if (job.number == arbor::BFLOAT16) return store_heads<bf16>(job);
    store_heads<float>(job);
}

}  // namespace
