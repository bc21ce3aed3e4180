// The kernels as compiled for the instruction set of the translation unit that includes this.
#pragma once

#include "attention.h"
#include "block_linear.h"
#include "choose.h"
#include "fused.h"
#include "head_select.h"
#include "head_share.h"
#include "int8.h"
#include "linear.h"
#include "rotary.h"

#define ARBOR_KERNELS(name) \
    const arbor::Kernels arbor::name##_kernels = {#name, attention_parts, attention, \
                                                  linear_parts, any_linear, decode_rows, norm, gated, store_int8, rotary, \
                                                  add, select_heads, list_moves, count_held, \
                                                  share_cells, list_shared, choose, sum_logits}
