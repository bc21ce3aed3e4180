#include "kernels.h"

ARBOR_KERNELS(amx);
