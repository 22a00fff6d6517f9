/* Kernels for which rows are the frames of utterances: the depthwise convolution and the parts of attention. */

/* Where the frames end that the convolution at a frame sees: with its chunk, or with the utterance. */
static inline int64_t OUT(seen)(int64_t frame, int64_t chunk, int64_t frames) {
    const int64_t end = (frame / chunk + 1) * chunk;
    return end < frames ? end : frames;
}

/* Depthwise convolution over the frames of each utterance, with a kernel [taps, columns]; taps is odd. Frames behind a
   frame's chunk are 0 for it. */
API void OUT(depthwise_forward)(const T *restrict x, const float *restrict kernel, const float *restrict bias,
                                T *restrict out, int taps, int64_t chunk, int64_t frames, int64_t rows, int64_t columns,
                                int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < rows; i++) {
        float sum[WIDEST];
        const int64_t end_seen = OUT(seen)(i % frames, chunk, frames);
        memcpy(sum, bias, columns * sizeof(float));
        for (int64_t k = 0; k < taps; k++) {
            const int64_t away = k - taps / 2, frame = i % frames + away;
            if (frame < 0 || frame >= end_seen) continue;
            const T *restrict from = x + (i + away) * columns;
            const float *restrict by = kernel + k * columns;
#pragma omp simd
            for (int64_t j = 0; j < columns; j++) sum[j] += LOAD(from[j]) * by[j];
        }
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) out[i * columns + j] = STORE(sum[j]);
    }
}

/* Gradients of depthwise_forward: to becomes that of x, the first row of sums [threads, taps + 1, columns] those of
   kernel and bias. */
API void OUT(depthwise_backward)(const T *restrict grad, const T *restrict x, const float *restrict kernel,
                                 T *restrict to, float *restrict sums, int taps, int64_t chunk, int64_t frames,
                                 int64_t rows, int64_t columns, int threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t first, end;
        float sum[WIDEST], down[WIDEST];
        float *restrict of_kernel = sums + omp_get_thread_num() * (taps + 1) * columns;
        float *restrict of_bias = of_kernel + taps * columns;
        share(rows, &first, &end);
        for (int64_t i = first; i < end; i++) {
            memset(sum, 0, columns * sizeof(float));
#pragma omp simd
            for (int64_t j = 0; j < columns; j++) {
                down[j] = LOAD(grad[i * columns + j]);
                of_bias[j] += down[j];
            }
            const int64_t frame = i % frames, end_seen = OUT(seen)(frame, chunk, frames);
            for (int64_t k = 0; k < taps; k++) {
                const int64_t away = k - taps / 2;
                if (frame + away >= 0 && frame + away < end_seen) {
                    const T *restrict from = x + (i + away) * columns;
                    float *restrict mine = of_kernel + k * columns;
#pragma omp simd
                    for (int64_t j = 0; j < columns; j++) mine[j] += down[j] * LOAD(from[j]);
                }
                if (frame - away >= 0 && frame - away < frames && frame < OUT(seen)(frame - away, chunk, frames)) {
                    const T *restrict from = grad + (i - away) * columns;
                    const float *restrict by = kernel + k * columns;
#pragma omp simd
                    for (int64_t j = 0; j < columns; j++) sum[j] += LOAD(from[j]) * by[j];
                }
            }
#pragma omp simd
            for (int64_t j = 0; j < columns; j++) to[i * columns + j] = STORE(sum[j]);
        }
    }
    gather(sums, (taps + 1) * columns, threads);
}

/* Splits rows of queries, keys and values [heads, 3, size] into three tensors [utterances, heads, frames, size]. Pairs
   of values of queries and keys are rotated by their frame's angles, given as cosines and sines [frames, size] with the
   first sine of each pair negated; queries are multiplied by scale. */
API void OUT(heads_forward)(const T *restrict x, const float *restrict cosines, const float *restrict sines,
                            float scale, T *restrict query, T *restrict key, T *restrict value, int64_t heads,
                            int64_t frames, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < rows; i++) {
        const int64_t frame = i % frames;
        const float *restrict c = cosines + frame * size, *restrict s = sines + frame * size;
        for (int64_t h = 0; h < heads; h++) {
            const T *restrict q = x + (i * heads + h) * 3 * size, *restrict k = q + size;
            const int64_t at = ((i / frames * heads + h) * frames + frame) * size;
#pragma omp simd
            for (int64_t j = 0; j < size; j += 2) {
                const float q0 = LOAD(q[j]), q1 = LOAD(q[j + 1]), k0 = LOAD(k[j]), k1 = LOAD(k[j + 1]);
                query[at + j] = STORE((q0 * c[j] + q1 * s[j]) * scale);
                query[at + j + 1] = STORE((q1 * c[j + 1] + q0 * s[j + 1]) * scale);
                key[at + j] = STORE(k0 * c[j] + k1 * s[j]);
                key[at + j + 1] = STORE(k1 * c[j + 1] + k0 * s[j + 1]);
            }
            memcpy(value + at, k + size, size * sizeof(T));
        }
    }
}

/* Gradient of heads_forward: to becomes that of x. */
API void OUT(heads_backward)(const T *restrict query, const T *restrict key, const T *restrict value,
                             const float *restrict cosines, const float *restrict sines, float scale, T *restrict to,
                             int64_t heads, int64_t frames, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < rows; i++) {
        const int64_t frame = i % frames;
        const float *restrict c = cosines + frame * size, *restrict s = sines + frame * size;
        for (int64_t h = 0; h < heads; h++) {
            T *restrict q = to + (i * heads + h) * 3 * size, *restrict k = q + size;
            const int64_t at = ((i / frames * heads + h) * frames + frame) * size;
#pragma omp simd
            for (int64_t j = 0; j < size; j += 2) {
                const float q0 = LOAD(query[at + j]) * scale, q1 = LOAD(query[at + j + 1]) * scale;
                const float k0 = LOAD(key[at + j]), k1 = LOAD(key[at + j + 1]);
                q[j] = STORE(q0 * c[j] + q1 * s[j + 1]);
                q[j + 1] = STORE(q1 * c[j + 1] + q0 * s[j]);
                k[j] = STORE(k0 * c[j] + k1 * s[j + 1]);
                k[j + 1] = STORE(k1 * c[j + 1] + k0 * s[j]);
            }
            memcpy(k + size, value + at, size * sizeof(T));
        }
    }
}

/* Splits rows as heads_forward does, for relative positions: without rotation, and with a bias [heads, size] added to
   queries: bias_u in query, for the scores of keys, and bias_v in query_v [heads, utterances, frames, size], for those
   of positions. query_v has the heads first, so that one matrix product a head takes the frames of all utterances. */
API void OUT(relative_forward)(const T *restrict x, const float *restrict bias_u, const float *restrict bias_v,
                               float scale, T *restrict query, T *restrict query_v, T *restrict key, T *restrict value,
                               int64_t heads, int64_t frames, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < rows; i++)
        for (int64_t h = 0; h < heads; h++) {
            const T *restrict q = x + (i * heads + h) * 3 * size;
            const float *restrict u = bias_u + h * size, *restrict v = bias_v + h * size;
            const int64_t at = ((i / frames * heads + h) * frames + i % frames) * size;
            const int64_t apart = (h * rows + i) * size;
#pragma omp simd
            for (int64_t j = 0; j < size; j++) {
                query[at + j] = STORE((LOAD(q[j]) + u[j]) * scale);
                query_v[apart + j] = STORE((LOAD(q[j]) + v[j]) * scale);
            }
            memcpy(key + at, q + size, size * sizeof(T));
            memcpy(value + at, q + 2 * size, size * sizeof(T));
        }
}

/* Gradients of relative_forward: to becomes that of x, the first row of sums [threads, 2, heads, size] those of bias_u
   and bias_v. */
API void OUT(relative_backward)(const T *restrict query, const T *restrict query_v, const T *restrict key,
                                const T *restrict value, float scale, T *restrict to, float *restrict sums,
                                int64_t heads, int64_t frames, int64_t rows, int64_t size, int threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t first, end;
        float *restrict of_bias_u = sums + omp_get_thread_num() * 2 * heads * size;
        float *restrict of_bias_v = of_bias_u + heads * size;
        share(rows, &first, &end);
        for (int64_t i = first; i < end; i++)
            for (int64_t h = 0; h < heads; h++) {
                T *restrict q = to + (i * heads + h) * 3 * size;
                float *restrict u = of_bias_u + h * size, *restrict v = of_bias_v + h * size;
                const int64_t at = ((i / frames * heads + h) * frames + i % frames) * size;
                const int64_t apart = (h * rows + i) * size;
#pragma omp simd
                for (int64_t j = 0; j < size; j++) {
                    const float one = LOAD(query[at + j]) * scale, other = LOAD(query_v[apart + j]) * scale;
                    u[j] += one;
                    v[j] += other;
                    q[j] = STORE(one + other);
                }
                memcpy(q + size, key + at, size * sizeof(T));
                memcpy(q + 2 * size, value + at, size * sizeof(T));
            }
    }
    gather(sums, 2 * heads * size, threads);
}

/* Where the values for row i of scores [utterances, heads, columns, columns] begin in position_scores [heads,
   utterances, columns, 2 * columns - 1]. There column m is for keys m - (columns - 1) frames behind a row's own. So the
   values for keys 0, 1, ... begin at column columns - 1 - frame: rows of later frames begin further to the left. */
static inline int64_t OUT(shifted)(int64_t i, int64_t heads, int64_t rows, int64_t columns) {
    const int64_t frame = i % columns, head = i / columns % heads, utterance = i / columns / heads;
    return (head * (rows / heads) + utterance * columns + frame) * (2 * columns - 1) + columns - 1 - frame;
}

/* Narrows low and high to the columns of a row of a mask between which all its zeros are; leaves them if it has none. */
static inline void OUT(narrow)(const uint8_t *restrict mask, int64_t *low, int64_t *high) {
    int64_t first = *low, end = *high;
    while (first < end && mask[first]) first++;
    if (first == end) return;
    while (mask[end - 1]) end--;
    *low = first;
    *high = end;
}

/* Replaces rows of scores [utterances, heads, columns, columns], plus position_scores if not null (see shifted), by
   their softmax; out gets the softmax with dropout. skip has a row for each utterance, pairs [columns, columns] one for
   each frame: columns where one of them is 1 get weight 0, or equal weights if all are masked. */
API void OUT(softmax_forward)(T *restrict scores, const T *restrict position_scores, const uint8_t *restrict skip,
                              const uint8_t *restrict pairs, const Dropout *dropout, T *restrict out, int64_t heads,
                              int64_t rows, int64_t columns, int threads) {
    const Dropout drop = *dropout;
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < rows; i++) {
        float row[WIDEST];
        const int64_t at = i * columns;
        int64_t low = 0, high = columns;
        float most = -1e30f, sum = 0;
        const uint8_t *restrict beyond = pairs ? pairs + i % columns * columns : NULL;
        if (beyond) OUT(narrow)(beyond, &low, &high);
        if (position_scores) {
            const T *restrict add = position_scores + OUT(shifted)(i, heads, rows, columns);
#pragma omp simd
            for (int64_t j = low; j < high; j++) row[j] = LOAD(scores[at + j]) + LOAD(add[j]);
        } else {
#pragma omp simd
            for (int64_t j = low; j < high; j++) row[j] = LOAD(scores[at + j]);
        }
        if (skip) {
            const uint8_t *restrict without = skip + i / columns / heads * columns;
#pragma omp simd
            for (int64_t j = low; j < high; j++) row[j] = without[j] ? -1e30f : row[j];
        }
        if (beyond) {
#pragma omp simd
            for (int64_t j = low; j < high; j++) row[j] = beyond[j] ? -1e30f : row[j];
        }
#pragma omp simd reduction(max : most)
        for (int64_t j = low; j < high; j++) most = row[j] > most ? row[j] : most;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = low; j < high; j++) {
            const float below = row[j] - most;
            row[j] = below < -80.0f ? 0.0f : exponential(below); /* products of denormals are slow */
            sum += row[j];
        }
        const float share_of = 1.0f / sum;
        memset(scores + at, 0, low * sizeof(T));
        memset(scores + at + high, 0, (columns - high) * sizeof(T));
        memset(out + at, 0, low * sizeof(T));
        memset(out + at + high, 0, (columns - high) * sizeof(T));
        if (drop.one) {
#pragma omp simd
            for (int64_t j = low; j < high; j++) {
                const float weight = row[j] * share_of;
                scores[at + j] = STORE(weight);
                out[at + j] = STORE(weight * kept(drop, at + j));
            }
        } else {
#pragma omp simd
            for (int64_t j = low; j < high; j++) out[at + j] = scores[at + j] = STORE(row[j] * share_of);
        }
    }
}

/* Gradients of softmax_forward: grad, at first that of its out, becomes that of scores. If not null, position_scores
   becomes the gradient of the tensor of this name there: each row of grad at the columns that were added to it, and 0
   in all others. out gets the softmax with dropout again. */
API void OUT(softmax_backward)(T *restrict grad, const T *restrict weights, const Dropout *dropout, T *restrict out,
                               T *restrict position_scores, int64_t heads, int64_t rows, int64_t columns,
                               int threads) {
    const Dropout drop = *dropout;
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < rows; i++) {
        float row[WIDEST], down[WIDEST];
        const int64_t at = i * columns;
        float along = 0;
#pragma omp simd reduction(+ : along)
        for (int64_t j = 0; j < columns; j++) {
            const float keep = drop.one ? kept(drop, at + j) : 1.0f;
            row[j] = LOAD(weights[at + j]);
            down[j] = LOAD(grad[at + j]) * keep;
            along += down[j] * row[j];
            out[at + j] = STORE(row[j] * keep);
        }
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) grad[at + j] = STORE(row[j] * (down[j] - along));
        if (position_scores) {
            const int64_t frame = i % columns;
            T *restrict to = position_scores + OUT(shifted)(i, heads, rows, columns);
            memset(to - (columns - 1 - frame), 0, (columns - 1 - frame) * sizeof(T));
            memcpy(to, grad + at, columns * sizeof(T));
            memset(to + columns, 0, frame * sizeof(T));
        }
    }
}
