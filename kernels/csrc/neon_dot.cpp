#include "kernels.h"

ARBOR_KERNELS(neon_dot);
