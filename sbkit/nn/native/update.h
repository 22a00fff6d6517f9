/* Kernels that update weights, each for a whole list of tensors in one pass over memory.

   starts says how many blocks of BLOCK values the tensors before each have together, and as its last element all.
   Threads have equal shares of the blocks, and sums are of blocks, so that any number of threads gives the same bits.
   Weights, gradients and an optimizer's state are float; T is the type in which matrices are multiplied. */

/* out[k] becomes the sum of the squares of the values of block k. */
API void OUT(sum_squares)(const float *const *tensors, double *restrict out, const int64_t *lengths,
                          const int64_t *starts, int64_t count, int threads) {
#pragma omp parallel num_threads(threads)
    for (Blocks at = own_blocks(lengths, starts, count); next_block(&at);)
        out[at.number] = squares(tensors[at.tensor] + at.first, at.size);
}

/* Nesterov's momentum: where the momentum is heading, from which it is on with a gradient. */
static inline float OUT(heading)(float grad, float moment, float momentum) { return grad + momentum * (moment - grad); }

/* moments = momentum * moments + (1 - momentum) * grads / divisor. Where ahead is not null, it becomes Nesterov's
   momentum, divided by its norm over the whole tensor, or by tiny if that is larger. sums has a place for each block. */
API void OUT(momentum)(const float *const *grads, float *const *moments, T *const *ahead, float divisor,
                       double momentum, double tiny, double *restrict sums, const int64_t *lengths,
                       const int64_t *starts, int64_t count, int threads) {
    const float scale = 1.0f / divisor, fresh = 1.0 - momentum;
#pragma omp parallel num_threads(threads)
    {
        for (Blocks at = own_blocks(lengths, starts, count); next_block(&at);) {
            const float *restrict grad = grads[at.tensor] + at.first;
            float *restrict moment = moments[at.tensor] + at.first;
#pragma omp simd
            for (int64_t i = 0; i < at.size; i++) moment[i] += fresh * (grad[i] * scale - moment[i]);
            if (!ahead[at.tensor]) continue;
            float headings[BLOCK];
#pragma omp simd
            for (int64_t i = 0; i < at.size; i++) headings[i] = OUT(heading)(grad[i] * scale, moment[i], momentum);
            sums[at.number] = squares(headings, at.size);
        }
        /* A norm is known once all of its blocks are, so headings are computed twice, and stored once. */
#pragma omp barrier
        for (Blocks at = own_blocks(lengths, starts, count); next_block(&at);) {
            if (!ahead[at.tensor]) continue;
            double sum = 0;
            for (int64_t k = starts[at.tensor]; k < starts[at.tensor + 1]; k++) sum += sums[k];
            const double norm = __builtin_sqrt(sum), factor = 1.0 / (norm < tiny ? tiny : norm);
            const float *restrict grad = grads[at.tensor] + at.first, *restrict moment = moments[at.tensor] + at.first;
            T *restrict out = ahead[at.tensor] + at.first;
#pragma omp simd
            for (int64_t i = 0; i < at.size; i++)
                out[i] = STORE((float)(factor * OUT(heading)(grad[i] * scale, moment[i], momentum)));
        }
    }
}

/* weights = keep * weights + step * directions. Where updates is not null, the direction is first factor * updates; it
   is stored where directions is not null. */
API void OUT(move)(float *const *weights, const T *const *updates, const float *factors, float *const *directions,
                   float keep, float step, const int64_t *lengths, const int64_t *starts, int64_t count,
                   int threads) {
#pragma omp parallel num_threads(threads)
    for (Blocks at = own_blocks(lengths, starts, count); next_block(&at);) {
        float *restrict weight = weights[at.tensor] + at.first;
        float *restrict direction = directions[at.tensor] ? directions[at.tensor] + at.first : 0;
        const T *restrict update = updates[at.tensor] ? updates[at.tensor] + at.first : 0;
        const float factor = factors[at.tensor];
        if (!update)
#pragma omp simd
            for (int64_t i = 0; i < at.size; i++) weight[i] = keep * weight[i] + step * direction[i];
        else if (!direction)
#pragma omp simd
            for (int64_t i = 0; i < at.size; i++) weight[i] = keep * weight[i] + step * (factor * LOAD(update[i]));
        else
#pragma omp simd
            for (int64_t i = 0; i < at.size; i++) {
                direction[i] = factor * LOAD(update[i]);
                weight[i] = keep * weight[i] + step * direction[i];
            }
    }
}

/* A step of AdamW on gradients divided by divisor; steps, of each tensor, are counted. */
API void OUT(adamw)(float *const *weights, const float *const *grads, float *const *means, float *const *variances,
                    float *const *steps, float divisor, double lr, double beta1, double beta2, double decay, double eps,
                    const int64_t *lengths, const int64_t *starts, int64_t count, int threads) {
    const float scale = 1.0f / divisor, keep = 1.0 - lr * decay, least = eps;
    const float new_mean = 1.0 - beta1, old_variance = beta2, new_variance = 1.0 - beta2;
#pragma omp parallel num_threads(threads)
    for (Blocks at = own_blocks(lengths, starts, count); next_block(&at);) {
        const int64_t step = *steps[at.tensor] + 1;
        const float rate = lr / (1.0 - power(beta1, step));
        const float correction = 1.0 / __builtin_sqrt(1.0 - power(beta2, step));
        float *restrict weight = weights[at.tensor] + at.first;
        float *restrict mean = means[at.tensor] + at.first, *restrict variance = variances[at.tensor] + at.first;
        const float *restrict grad = grads[at.tensor] + at.first;
#pragma omp simd
        for (int64_t i = 0; i < at.size; i++) {
            const float g = grad[i] * scale;
            mean[i] += new_mean * (g - mean[i]);
            variance[i] = old_variance * variance[i] + new_variance * g * g;
            weight[i] = keep * weight[i] - rate * mean[i] / (__builtin_sqrtf(variance[i]) * correction + least);
        }
    }
    for (int64_t i = 0; i < count; i++) *steps[i] += 1;
}
