/* Sums of the stand-in for NCCL: over all ranks, in the order of ranks. Each addition is rounded to the type of the
 * elements, as in a ring of NCCL. NCCL's own order depends on the channel and the algorithm. */
#include "nccl.h"

#include <stdint.h>
#include <string.h>

/* Values of ncclDataType_t. */
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8E4M3, FLOAT8E5M2 };

size_t type_width(int type) {
    static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type <= FLOAT8E5M2 ? widths[type] : 0;
}

int type_has_sum(int type) { return type >= INT8 && type < FLOAT8E4M3; }

static float from_bf16(uint16_t bits) {
    uint32_t all = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &all, sizeof value);
    return value;
}

static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value)
        return 0x7fff;
    /* Rounds to nearest, ties to even. */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#define EACH(type, expression)                                                                                     \
    do {                                                                                                           \
        type *a = sum;                                                                                             \
        const type *b = numbers;                                                                                   \
        for (size_t i = 0; i < count; i++)                                                                         \
            a[i] = (type)(expression);                                                                             \
    } while (0)

void add(void *sum, const void *numbers, size_t count, int type) {
    switch (type) {
    case INT8: case UINT8: EACH(uint8_t, a[i] + b[i]); break;
    case INT32: case UINT32: EACH(uint32_t, a[i] + b[i]); break;
    case INT64: case UINT64: EACH(uint64_t, a[i] + b[i]); break;
    case FLOAT16: EACH(_Float16, (float)a[i] + (float)b[i]); break;
    case FLOAT32: EACH(float, a[i] + b[i]); break;
    case FLOAT64: EACH(double, a[i] + b[i]); break;
    case BFLOAT16: EACH(uint16_t, to_bf16(from_bf16(a[i]) + from_bf16(b[i]))); break;
    default: break;
    }
}

void divide(void *sum, size_t count, int type, int ranks) {
    const void *numbers = sum;
    switch (type) {
    case FLOAT16: EACH(_Float16, (float)b[i] / (float)ranks); break;
    case FLOAT32: EACH(float, b[i] / (float)ranks); break;
    case FLOAT64: EACH(double, b[i] / ranks); break;
    case BFLOAT16: EACH(uint16_t, to_bf16(from_bf16(b[i]) / (float)ranks)); break;
    default: break;
    }
}
