// RMS norms, gated activations and residual sums, rounded as transformers rounds them. One row at a time, in one
// order of sums, so that a row's bits do not depend on the other rows.
#pragma once

#include "native.h"
#include "vector.h"

namespace {

using arbor::AddJob;
using arbor::GatedJob;
using arbor::NormJob;

inline Vec rounded(Vec a, const float*) { return a; }

inline Vec rounded(Vec a, const bf16*) {
    bf16 narrow_ones[Vec::WIDTH];
    store(narrow_ones, a);
    return load(narrow_ones);
}

// Calls `visit(place, load, store)` for the vectors of a row; the last one may be partial.
template <class Number, class Visit>
void each_vector(int width, Visit visit) {
    int place = 0;
    for (; place + Vec::WIDTH <= width; place += Vec::WIDTH) {
        visit(
            place, [](const Number* p) { return load(p); }, [](Number* p, Vec a) { store(p, a); });
    }
    int rest = width - place;
    if (rest) {
        visit(
            place, [rest](const Number* p) { return load_first(p, rest, 0.0f); },
            [rest](Number* p, Vec a) { store_first(p, rest, a); });
    }
}

template <class Number>
void norm_rows(const NormJob& job) {
    const Number* weight = static_cast<const Number*>(job.weight);
    for (int row = 0; row < job.rows; row++) {
        const Number* x = static_cast<const Number*>(job.x) + row * job.x_row;
        Number* out = static_cast<Number*>(job.out) + static_cast<int64_t>(row) * job.width;
        Vec squares[4] = {set1(0.0f), set1(0.0f), set1(0.0f), set1(0.0f)};
        each_vector<Number>(job.width, [&](int place, auto get, auto) {
            Vec value = get(x + place);
            Vec& sum_of = squares[place / Vec::WIDTH % 4];
            sum_of = fma(value, value, sum_of);
        });
        float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
        float mean = total / static_cast<float>(job.width);
        Vec factor = set1(1.0f / __builtin_sqrtf(mean + job.eps)), offset = set1(job.offset);
        each_vector<Number>(job.width, [&](int place, auto get, auto put) {
            Vec value = get(x + place) * factor;
            if (job.rounds_first) value = rounded(value, x);
            put(out + place, value * (get(weight + place) + offset));
        });
    }
}

// 0 where e^-x is held.
inline Vec silu(Vec x) {
    return zero_below(x / (set1(1.0f) + exp(set1(0.0f) - x)), x, -88.3f);
}

inline Vec gelu_tanh(Vec x) {
    Vec inner = set1(0.7978845608028654f) * fma(set1(0.044715f) * x * x, x, x);
    return set1(0.5f) * x * (set1(1.0f) + tanh(inner));
}

template <class Number>
void gated_rows(const GatedJob& job) {
    for (int row = 0; row < job.rows; row++) {
        const Number* gate = static_cast<const Number*>(job.gate) + row * job.gate_row;
        const Number* up = static_cast<const Number*>(job.up) + row * job.up_row;
        Number* out = static_cast<Number*>(job.out) + static_cast<int64_t>(row) * job.width;
        each_vector<Number>(job.width, [&](int place, auto get, auto put) {
            Vec value = get(gate + place);
            value = rounded(job.activation ? gelu_tanh(value) : silu(value), gate);
            put(out + place, value * get(up + place));
        });
    }
}

template <class Number>
void add_numbers(const AddJob& job) {
    const Number* x = static_cast<const Number*>(job.x);
    Number* y = static_cast<Number*>(job.y);
    Vec factor = set1(job.factor);
    auto part = [&](Vec number) { return job.factor == 1.0f ? number : rounded(number * factor, x); };
    int64_t at = 0;
    for (; at + Vec::WIDTH <= job.count; at += Vec::WIDTH) {
        store(y + at, load(y + at) + part(load(x + at)));
    }
    int rest = static_cast<int>(job.count - at);
    if (!rest) return;
    store_first(y + at, rest, load_first(y + at, rest, 0.0f) + part(load_first(x + at, rest, 0.0f)));
}

void norm(const NormJob& job) {
    if (job.number == arbor::BFLOAT16) return norm_rows<bf16>(job);
    norm_rows<float>(job);
}

void gated(const GatedJob& job) {
    if (job.number == arbor::BFLOAT16) return gated_rows<bf16>(job);
    gated_rows<float>(job);
}

void add(const AddJob& job) {
    if (job.number == arbor::BFLOAT16) return add_numbers<bf16>(job);
    add_numbers<float>(job);
}

}  // namespace
