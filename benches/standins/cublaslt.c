/* A stand-in for cuBLASLt, libcublasLt.so.13. Each product appends a line to the trace. Checks the rules of the
 * library (matching sizes, supported combinations of types, an algorithm that was selected for the product). Computes
 * products only with FAKE_CUBLASLT_COMPUTE or FAKE_CUDA_EXECUTE: device memory is host memory. */
#include "trace.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
enum { SUCCESS = 0, OUT_OF_MEMORY = 3, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };

/* Values of cudaDataType. */
enum { R_32F = 0, R_16F = 2, R_16BF = 14 };

/* Values of cublasComputeType_t and cublasLtEpilogue_t. */
enum { COMPUTE_32F = 68, COMPUTE_32F_TF32 = 77, EPILOGUE_DEFAULT = 1, EPILOGUE_BIAS = 4 };

typedef struct layout { uint64_t rows, columns; int64_t leading; int type; } *Layout;
typedef struct { int compute, scale, transposed[2], epilogue; void *bias; } *Description;
typedef struct { uint64_t workspace; uint32_t aligned[4]; } *Preference;
typedef struct { uint64_t data[8]; } Algorithm;
typedef struct {
    Algorithm algorithm;
    size_t workspace;
    Result state;
    float waves;
    int reserved[4];
} Heuristic;

size_t cublasLtGetVersion(void) { return 130000; }

Result cublasLtCreate(void **handle) {
    trace("cublaslt_create");
    *handle = malloc(1);
    return *handle != NULL ? SUCCESS : OUT_OF_MEMORY;
}

Result cublasLtDestroy(void *handle) {
    free(handle);
    return SUCCESS;
}

Result cublasLtMatmulDescCreate(Description *made, int compute, int scale) {
    *made = calloc(1, sizeof **made);
    if (*made == NULL)
        return OUT_OF_MEMORY;
    (*made)->compute = compute;
    (*made)->scale = scale;
    (*made)->epilogue = EPILOGUE_DEFAULT;
    return SUCCESS;
}

Result cublasLtMatmulDescDestroy(Description description) {
    free(description);
    return SUCCESS;
}

/* Supports the attributes of cublasLtMatmulDescAttributes_t that Kiln sets. */
Result cublasLtMatmulDescSetAttribute(Description description, int attribute, const void *value, size_t size) {
    void *to;
    switch (attribute) {
    case 3: to = &description->transposed[0]; break;
    case 4: to = &description->transposed[1]; break;
    case 7: to = &description->epilogue; break;
    case 8: to = &description->bias; break;
    default: return INVALID_VALUE;
    }
    if (size != (attribute == 8 ? sizeof(void *) : sizeof(int)))
        return INVALID_VALUE;
    memcpy(to, value, size);
    return SUCCESS;
}

Result cublasLtMatmulPreferenceCreate(Preference *made) {
    *made = calloc(1, sizeof **made);
    if (*made == NULL)
        return OUT_OF_MEMORY;
    for (int i = 0; i < 4; i++)
        (*made)->aligned[i] = 256;
    return SUCCESS;
}

Result cublasLtMatmulPreferenceDestroy(Preference preference) {
    free(preference);
    return SUCCESS;
}

/* Supports three attributes of cublasLtMatmulPreferenceAttributes_t: the bytes of workspace, the scheme for partial
 * sums, and the alignment of the matrices. Kiln promises sums in f32: CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE is 2. */
Result cublasLtMatmulPreferenceSetAttribute(Preference preference, int attribute, const void *value, size_t size) {
    if (attribute == 1 && size == sizeof preference->workspace)
        memcpy(&preference->workspace, value, size);
    else if (attribute == 3 && size == sizeof(uint32_t))
        return *(const uint32_t *)value == 2 ? SUCCESS : INVALID_VALUE;
    else if (attribute >= 5 && attribute <= 8 && size == sizeof(uint32_t))
        memcpy(&preference->aligned[attribute - 5], value, size);
    else
        return INVALID_VALUE;
    return SUCCESS;
}

Result cublasLtMatrixLayoutCreate(Layout *made, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    *made = malloc(sizeof **made);
    if (*made == NULL)
        return OUT_OF_MEMORY;
    (*made)->type = type;
    (*made)->rows = rows;
    (*made)->columns = columns;
    (*made)->leading = leading;
    return SUCCESS;
}

Result cublasLtMatrixLayoutDestroy(Layout layout) {
    free(layout);
    return SUCCESS;
}

/* Matrices are column-major; batches are not supported. */
static uint64_t rows_of(Layout layout, int transposed) { return transposed ? layout->columns : layout->rows; }

static uint64_t columns_of(Layout layout, int transposed) { return transposed ? layout->rows : layout->columns; }

/* Returns SUCCESS if the library supports the product, by the table of cublasLtMatmul in its documentation. */
static Result check(Description of, Layout a, Layout b, Layout c, Layout d) {
    int ta = of->transposed[0], tb = of->transposed[1];
    Layout all[] = {a, b, c, d};
    for (int i = 0; i < 4; i++)
        if (all[i]->rows == 0 || all[i]->columns == 0 || all[i]->leading < (int64_t)all[i]->rows)
            return INVALID_VALUE;
    if (rows_of(a, ta) != d->rows || columns_of(b, tb) != d->columns || columns_of(a, ta) != rows_of(b, tb) ||
        c->rows != d->rows || c->columns != d->columns)
        return INVALID_VALUE;
    int known = a->type == R_32F || a->type == R_16F || a->type == R_16BF;
    int output = d->type == R_32F || d->type == a->type;
    int compute = of->compute == COMPUTE_32F || (of->compute == COMPUTE_32F_TF32 && a->type == R_32F);
    int epilogue = of->epilogue == EPILOGUE_DEFAULT || (of->epilogue == EPILOGUE_BIAS && of->bias != NULL);
    if (!known || b->type != a->type || !output || c->type != d->type || !compute || of->scale != R_32F ||
        !epilogue)
        return NOT_SUPPORTED;
    return SUCCESS;
}

/* Returns an algorithm. Its data is everything that must not change between selection and use, and its place in the
 * heuristic's list. */
static Algorithm algorithm_for(Description of, Layout a, Layout b, Layout d, const uint32_t *aligned,
                               uint32_t place) {
    return (Algorithm){{
        d->rows << 32 | d->columns,
        columns_of(a, of->transposed[0]),
        (uint64_t)a->leading << 32 | (uint64_t)b->leading,
        (uint64_t)d->leading,
        (uint64_t)a->type << 16 | (uint64_t)d->type << 8 | (uint64_t)of->compute,
        (uint64_t)of->transposed[0] << 16 | (uint64_t)of->transposed[1] << 8 | (uint64_t)of->epilogue,
        (uint64_t)aligned[0] << 32 | aligned[1],
        (uint64_t)place << 32 | aligned[3],
    }};
}

/* The workspace that every algorithm claims to need if that much is available, and the number of algorithms. */
enum { WORKSPACE = 1 << 20, NAMED = 3 };

/* Returns the duration of a product as measured by events: FAKE_CUBLASLT_SLOWEST milliseconds for the first algorithm,
 * and a millisecond less for each one after it. */
static double milliseconds_of(uint32_t place) {
    double slowest = setting("FAKE_CUBLASLT_SLOWEST", 0);
    return slowest > place ? slowest - place : 0;
}

/* Returns 1 if FAKE_CUBLASLT_NONE_ABOVE permits an algorithm. */
static int has_algorithm(Preference preference) {
    double most = setting("FAKE_CUBLASLT_NONE_ABOVE", INFINITY);
    int fits = isinf(most) || preference->workspace == 0;
    for (int i = 0; i < 4; i++)
        fits = fits && preference->aligned[i] <= most;
    return fits;
}

Result cublasLtMatmulAlgoGetHeuristic(void *handle, Description description, Layout a, Layout b, Layout c,
                                      Layout d, Preference preference, int requested, Heuristic *results,
                                      int *returned) {
    (void)handle;
    *returned = 0;
    Result result = check(description, a, b, c, d);
    if (result == SUCCESS && !has_algorithm(preference))
        result = NOT_SUPPORTED;
    trace("cublaslt_heuristic m=%lu n=%lu k=%lu aligned=%u,%u,%u,%u workspace=%lu result=%d", d->rows, d->columns,
          columns_of(a, description->transposed[0]), preference->aligned[0], preference->aligned[1],
          preference->aligned[2], preference->aligned[3], preference->workspace, result);
    if (result != SUCCESS || requested < 1)
        return result;
    int named = requested < (int)NAMED ? requested : (int)NAMED;
    memset(results, 0, (size_t)named * sizeof *results);
    for (int place = 0; place < named; place++) {
        results[place].algorithm = algorithm_for(description, a, b, d, preference->aligned, (uint32_t)place);
        results[place].workspace = preference->workspace < WORKSPACE ? preference->workspace : WORKSPACE;
    }
    *returned = named;
    return SUCCESS;
}

static uint32_t place_of(const Algorithm *algorithm) { return (uint32_t)(algorithm->data[7] >> 32); }

/* Returns 1 if an algorithm was selected for these matrices. */
static int is_for(const Algorithm *algorithm, Description of, Layout a, Layout b, Layout d) {
    uint32_t promised[] = {(uint32_t)(algorithm->data[6] >> 32), (uint32_t)algorithm->data[6], 0,
                           (uint32_t)algorithm->data[7]};
    Algorithm needed = algorithm_for(of, a, b, d, promised, place_of(algorithm));
    return place_of(algorithm) < NAMED && memcmp(&needed, algorithm, sizeof needed) == 0;
}

Result cublasLtMatmulAlgoCheck(void *handle, Description of, Layout a, Layout b, Layout c, Layout d,
                               const Algorithm *algorithm, Heuristic *result) {
    (void)handle;
    Result status = check(of, a, b, c, d);
    if (status == SUCCESS && !is_for(algorithm, of, a, b, d))
        status = INVALID_VALUE;
    trace("cublaslt_check place=%u result=%d", place_of(algorithm), status);
    memset(result, 0, sizeof *result);
    result->algorithm = *algorithm;
    result->workspace = WORKSPACE;
    result->state = status;
    return status;
}

static uint64_t width(int type) { return type == R_32F ? 4 : 2; }

static float load(const void *from, int type, uint64_t index) {
    if (type == R_32F)
        return ((const float *)from)[index];
    if (type == R_16F)
        return (float)((const _Float16 *)from)[index];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[index] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void store(void *to, int type, uint64_t index, float value) {
    if (type == R_32F) {
        ((float *)to)[index] = value;
    } else if (type == R_16F) {
        ((_Float16 *)to)[index] = (_Float16)value;
    } else {
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        /* Rounds to nearest, ties to even. NaN does not occur, so it need not be kept distinct from infinity. */
        ((uint16_t *)to)[index] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

/* A product in a stream: copies of the caller's objects at the time of the call. */
struct product {
    int transposed[2], epilogue;
    void *bias;
    float alpha, beta;
    const void *a, *b, *c;
    void *d;
    struct layout of_a, of_b, of_c, of_d;
    uint64_t inner;
    int is_wrong;
};

/* d = alpha · op(a) · op(b) + beta · c (+ bias, one value per row of d). A wrong algorithm omits the last element of
 * the inner dimension. */
static int compute(void *data) {
    const struct product *p = data;
    uint64_t step_a = p->transposed[0] ? 1 : (uint64_t)p->of_a.leading;
    uint64_t row_a = p->transposed[0] ? (uint64_t)p->of_a.leading : 1;
    uint64_t step_b = p->transposed[1] ? (uint64_t)p->of_b.leading : 1;
    uint64_t column_b = p->transposed[1] ? 1 : (uint64_t)p->of_b.leading;
    uint64_t size = width(p->of_d.type);
    for (uint64_t column = 0; column < p->of_d.columns; column++) {
        for (uint64_t row = 0; row < p->of_d.rows; row++) {
            double sum = 0;
            for (uint64_t i = 0; i + (uint64_t)p->is_wrong < p->inner; i++)
                sum += (double)load(p->a, p->of_a.type, row * row_a + i * step_a) *
                       load(p->b, p->of_b.type, column * column_b + i * step_b);
            double value = p->alpha * sum;
            /* As in the library, c is not read if its factor is zero. */
            if (p->beta != 0)
                value += (double)p->beta * load(p->c, p->of_c.type, row + column * (uint64_t)p->of_c.leading);
            if (p->epilogue == EPILOGUE_BIAS)
                value += load(p->bias, p->of_d.type, row);
            store(p->d, p->of_d.type, row + column * (uint64_t)p->of_d.leading, (float)value);
        }
        wrote((char *)p->d + size * column * (uint64_t)p->of_d.leading, size * p->of_d.rows);
    }
    return SUCCESS;
}

/* The columns of a matrix. */
static struct span columns_at(const void *start, const struct layout *of, int writes) {
    uint64_t size = width(of->type);
    return (struct span){(uintptr_t)start, size * of->rows, of->columns, size * (uint64_t)of->leading, writes};
}

/* Submits the product to its stream. */
static Result submit(const struct product *p, void *workspace, size_t workspace_size, void *stream) {
    struct span spans[] = {
        columns_at(p->a, &p->of_a, 0), columns_at(p->b, &p->of_b, 0), columns_at(p->d, &p->of_d, 1),
        bytes_at(workspace, workspace_size, 1), {0}, {0},
    };
    size_t count = 4;
    if (p->beta != 0)
        spans[count++] = columns_at(p->c, &p->of_c, 0);
    if (p->epilogue == EPILOGUE_BIAS)
        spans[count++] = bytes_at(p->bias, width(p->of_d.type) * p->of_d.rows, 0);
    return in_stream(stream, "product of cuBLASLt", spans, count, compute, p, sizeof *p) == 0 ? SUCCESS
                                                                                        : EXECUTION_FAILED;
}

static const char *letter(int transposed) { return transposed ? "T" : "N"; }

static int aligned(const void *pointer, uint64_t to) { return (uintptr_t)pointer % to == 0; }

Result cublasLtMatmul(void *handle, Description of, const float *alpha, const void *a, Layout of_a, const void *b,
                      Layout of_b, const float *beta, const void *c, Layout of_c, void *d, Layout of_d,
                      const Algorithm *algorithm, void *workspace, size_t workspace_size, void *stream) {
    (void)handle;
    uint64_t inner = columns_of(of_a, of->transposed[0]);
    Result result = check(of, of_a, of_b, of_c, of_d);
    if (result == SUCCESS && !is_for(algorithm, of, of_a, of_b, of_d))
        result = INVALID_VALUE;
    if (result == SUCCESS &&
        !(aligned(a, algorithm->data[6] >> 32) && aligned(b, (uint32_t)algorithm->data[6]) &&
          aligned(d, (uint32_t)algorithm->data[7]) && aligned(of->bias, 16)))
        result = INVALID_VALUE;
    if (result == SUCCESS && (workspace_size < WORKSPACE || workspace == NULL || !aligned(workspace, 256)))
        result = INVALID_VALUE;
    if (result == SUCCESS)
        result = (Result)setting("FAKE_CUBLASLT_RESULT", SUCCESS);
    trace("cublaslt_matmul stream=%lu m=%lu n=%lu k=%lu transposed=%s%s leading=%ld,%ld,%ld types=%d,%d compute=%d "
          "alpha=%g beta=%g epilogue=%d place=%u a=%lx b=%lx c=%lx d=%lx bias=%lx workspace=%zu at=%lx result=%d",
          (unsigned long)stream, of_d->rows, of_d->columns, inner, letter(of->transposed[0]),
          letter(of->transposed[1]), of_a->leading, of_b->leading, of_d->leading, of_a->type, of_d->type,
          of->compute, *alpha, *beta, of->epilogue, place_of(algorithm), (unsigned long)a, (unsigned long)b, (unsigned long)c,
          (unsigned long)d, (unsigned long)of->bias, workspace_size, (unsigned long)workspace, result);
    take_time();
    double most = setting("FAKE_CUBLASLT_COMPUTE", setting("FAKE_CUDA_EXECUTE", 0) != 0 ? INFINITY : 0);
    if (result == SUCCESS && (double)of_d->rows * of_d->columns * inner <= most) {
        struct product product = {
            {of->transposed[0], of->transposed[1]}, of->epilogue, of->bias, *alpha, *beta, a, b, c, d,
            *of_a, *of_b, *of_c, *of_d, inner, setting("FAKE_CUBLASLT_WRONG", 0) == place_of(algorithm) + 1,
        };
        result = submit(&product, workspace, WORKSPACE, stream);
    }
    if (result == SUCCESS)
        took(milliseconds_of(place_of(algorithm)));
    return result;
}
