#include "kernels.h"

ARBOR_KERNELS(neon_bf16);
