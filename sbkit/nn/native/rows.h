/* Kernels that treat each row separately: layer norm, SiLU, residual sums, and the gated linear unit. */

/* out = dropout(activation(normalised x * gain + shift)); x is float, or T if narrow. The activation is SiLU if smooth,
   otherwise negative values are multiplied by slope. mean and rstd are kept for backward. */
API void OUT(norm_forward)(const void *x, int narrow, const float *restrict gain, const float *restrict shift,
                           float eps, int smooth, float slope, const Dropout *dropout, T *restrict out,
                           float *restrict mean, float *restrict rstd, int64_t rows, int64_t columns, int threads) {
    const Dropout drop = *dropout;
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < rows; i++) {
        float row[WIDEST];
        if (narrow)
#pragma omp simd
            for (int64_t j = 0; j < columns; j++) row[j] = LOAD(((const T *)x)[i * columns + j]);
        else
            memcpy(row, (const float *)x + i * columns, columns * sizeof(float));
        float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < columns; j++) sum += row[j];
        const float middle = sum / columns;
#pragma omp simd reduction(+ : squares)
        for (int64_t j = 0; j < columns; j++) squares += (row[j] - middle) * (row[j] - middle);
        const float scale = 1.0f / __builtin_sqrtf(squares / columns + eps);
        const int64_t at = i * columns;
        if (smooth)
#pragma omp simd
            for (int64_t j = 0; j < columns; j++) row[j] = silu((row[j] - middle) * scale * gain[j] + shift[j]);
        else
#pragma omp simd
            for (int64_t j = 0; j < columns; j++) {
                const float value = (row[j] - middle) * scale * gain[j] + shift[j];
                row[j] = value > 0 ? value : value * slope;
            }
        if (drop.one)
#pragma omp simd
            for (int64_t j = 0; j < columns; j++) out[at + j] = STORE(row[j] * kept(drop, at + j));
        else
#pragma omp simd
            for (int64_t j = 0; j < columns; j++) out[at + j] = STORE(row[j]);
        mean[i] = middle;
        rstd[i] = scale;
    }
}

/* Gradients of norm_forward: to, float or T if narrow, becomes the gradient of x, plus add if that is not null. The
   first row of sums [threads, 2, columns] becomes the gradients of gain and shift. */
API void OUT(norm_backward)(const T *restrict grad, const void *x, int narrow, const float *restrict gain,
                            const float *restrict shift, int smooth, float slope, const Dropout *dropout,
                            const float *restrict mean, const float *restrict rstd, const float *restrict add,
                            void *to, float *restrict sums, int64_t rows, int64_t columns, int threads) {
    const Dropout drop = *dropout;
#pragma omp parallel num_threads(threads)
    {
        int64_t first, end;
        float row[WIDEST], down[WIDEST];
        float *restrict of_gain = sums + omp_get_thread_num() * 2 * columns, *restrict of_shift = of_gain + columns;
        share(rows, &first, &end);
        for (int64_t i = first; i < end; i++) {
            const int64_t at = i * columns;
            if (narrow)
#pragma omp simd
                for (int64_t j = 0; j < columns; j++) row[j] = (LOAD(((const T *)x)[at + j]) - mean[i]) * rstd[i];
            else
#pragma omp simd
                for (int64_t j = 0; j < columns; j++) row[j] = (((const float *)x)[at + j] - mean[i]) * rstd[i];
#pragma omp simd
            for (int64_t j = 0; j < columns; j++) down[j] = LOAD(grad[at + j]);
            if (drop.one)
#pragma omp simd
                for (int64_t j = 0; j < columns; j++) down[j] *= kept(drop, at + j);
            if (smooth)
#pragma omp simd
                for (int64_t j = 0; j < columns; j++) down[j] *= silu_slope(row[j] * gain[j] + shift[j]);
            else if (slope != 1)
#pragma omp simd
                for (int64_t j = 0; j < columns; j++) down[j] *= row[j] * gain[j] + shift[j] > 0 ? 1 : slope;
            float sum = 0, along = 0;
#pragma omp simd reduction(+ : sum, along)
            for (int64_t j = 0; j < columns; j++) {
                of_shift[j] += down[j];
                of_gain[j] += down[j] * row[j];
                down[j] *= gain[j];
                sum += down[j];
                along += down[j] * row[j];
            }
            sum /= columns;
            along /= columns;
            if (narrow)
#pragma omp simd
                for (int64_t j = 0; j < columns; j++)
                    ((T *)to)[at + j] = STORE(rstd[i] * (down[j] - sum - row[j] * along));
            else if (add)
#pragma omp simd
                for (int64_t j = 0; j < columns; j++)
                    ((float *)to)[at + j] = add[at + j] + rstd[i] * (down[j] - sum - row[j] * along);
            else
#pragma omp simd
                for (int64_t j = 0; j < columns; j++)
                    ((float *)to)[at + j] = rstd[i] * (down[j] - sum - row[j] * along);
        }
    }
    gather(sums, 2 * columns, threads);
}

/* out = dropout(SiLU(x + bias)). */
API void OUT(silu_forward)(const T *restrict x, const float *restrict bias, const Dropout *dropout, T *restrict out,
                           int64_t rows, int64_t columns, int threads) {
    const Dropout drop = *dropout;
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < rows; i++) {
        const int64_t at = i * columns;
        if (drop.one)
#pragma omp simd
            for (int64_t j = 0; j < columns; j++)
                out[at + j] = STORE(silu(LOAD(x[at + j]) + bias[j]) * kept(drop, at + j));
        else
#pragma omp simd
            for (int64_t j = 0; j < columns; j++) out[at + j] = STORE(silu(LOAD(x[at + j]) + bias[j]));
    }
}

/* Gradients of silu_forward: grad becomes the gradient of x, the first row of sums [threads, columns] that of bias. */
API void OUT(silu_backward)(T *restrict grad, const T *restrict x, const float *restrict bias, const Dropout *dropout,
                            float *restrict sums, int64_t rows, int64_t columns, int threads) {
    const Dropout drop = *dropout;
#pragma omp parallel num_threads(threads)
    {
        int64_t first, end;
        float *restrict mine = sums + omp_get_thread_num() * columns;
        share(rows, &first, &end);
        for (int64_t i = first; i < end; i++) {
            const int64_t at = i * columns;
#pragma omp simd
            for (int64_t j = 0; j < columns; j++) {
                float value = LOAD(grad[at + j]) * silu_slope(LOAD(x[at + j]) + bias[j]);
                if (drop.one) value *= kept(drop, at + j);
                mine[j] += value;
                grad[at + j] = STORE(value);
            }
        }
    }
    gather(sums, columns, threads);
}

/* out = x + weight * dropout(branch + bias); only x in rows where skip is 1. */
API void OUT(add_forward)(const float *restrict x, const T *restrict branch, const float *restrict bias, float weight,
                          const uint8_t *restrict skip, const Dropout *dropout, float *restrict out, int64_t rows,
                          int64_t columns, int threads) {
    const Dropout drop = *dropout;
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < rows; i++) {
        const int64_t at = i * columns;
        if (skip && skip[i])
            memcpy(out + at, x + at, columns * sizeof(float));
        else if (drop.one)
#pragma omp simd
            for (int64_t j = 0; j < columns; j++)
                out[at + j] = x[at + j] + (LOAD(branch[at + j]) + bias[j]) * (weight * kept(drop, at + j));
        else
#pragma omp simd
            for (int64_t j = 0; j < columns; j++)
                out[at + j] = x[at + j] + (LOAD(branch[at + j]) + bias[j]) * weight;
    }
}

/* Gradients of add_forward: to becomes the gradient of branch, and the first row of sums [threads, columns] that of
   bias. */
API void OUT(add_backward)(const float *restrict grad, float weight, const uint8_t *restrict skip,
                           const Dropout *dropout, T *restrict to, float *restrict sums, int64_t rows, int64_t columns,
                           int threads) {
    const Dropout drop = *dropout;
#pragma omp parallel num_threads(threads)
    {
        int64_t first, end;
        float *restrict mine = sums + omp_get_thread_num() * columns;
        share(rows, &first, &end);
        for (int64_t i = first; i < end; i++) {
            const int64_t at = i * columns;
            if (skip && skip[i]) {
                memset(to + at, 0, columns * sizeof(T));
                continue;
            }
#pragma omp simd
            for (int64_t j = 0; j < columns; j++) {
                float value = grad[at + j] * weight;
                if (drop.one) value *= kept(drop, at + j);
                mine[j] += value;
                to[at + j] = STORE(value);
            }
        }
    }
    gather(sums, columns, threads);
}

/* out = the first half of x + bias times the sigmoid of its second half; 0 in rows where skip is 1. */
API void OUT(glu_forward)(const T *restrict x, const float *restrict bias, const uint8_t *restrict skip,
                          T *restrict out, int64_t rows, int64_t columns, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < rows; i++) {
        const T *restrict value = x + i * 2 * columns, *restrict gate = value + columns;
        T *restrict to = out + i * columns;
        if (skip && skip[i])
            memset(to, 0, columns * sizeof(T));
        else
#pragma omp simd
            for (int64_t j = 0; j < columns; j++)
                to[j] = STORE((LOAD(value[j]) + bias[j]) * sigmoid(LOAD(gate[j]) + bias[columns + j]));
    }
}

/* Gradients of glu_forward: to becomes the gradient of x, the first row of sums [threads, 2 * columns] that of bias. */
API void OUT(glu_backward)(const T *restrict grad, const T *restrict x, const float *restrict bias,
                           const uint8_t *restrict skip, T *restrict to, float *restrict sums, int64_t rows,
                           int64_t columns, int threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t first, end;
        float *restrict of_value = sums + omp_get_thread_num() * 2 * columns, *restrict of_gate = of_value + columns;
        share(rows, &first, &end);
        for (int64_t i = first; i < end; i++) {
            const T *restrict value = x + i * 2 * columns, *restrict gate = value + columns;
            const T *restrict down = grad + i * columns;
            T *restrict to_value = to + i * 2 * columns, *restrict to_gate = to_value + columns;
            if (skip && skip[i]) {
                memset(to_value, 0, 2 * columns * sizeof(T));
                continue;
            }
#pragma omp simd
            for (int64_t j = 0; j < columns; j++) {
                const float s = sigmoid(LOAD(gate[j]) + bias[columns + j]), g = LOAD(down[j]) * s;
                const float of_g = g * (LOAD(value[j]) + bias[j]) * (1.0f - s);
                of_value[j] += g;
                of_gate[j] += of_g;
                to_value[j] = STORE(g);
                to_gate[j] = STORE(of_g);
            }
        }
    }
    gather(sums, 2 * columns, threads);
}
