#include "kernels.h"

ARBOR_KERNELS(avx512_vnni);
