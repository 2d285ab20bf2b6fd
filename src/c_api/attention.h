// Attention's options from C, for attention and for shards.
#ifndef WHET_C_API_ATTENTION_H_
#define WHET_C_API_ATTENTION_H_

#include <whet/attention.h>
#include <whet/c_api.h>

#include <cstddef>

namespace whet::c_api {

// All but head_rules, whose number depends on the call. The struct as known_part() gave it.
AttentionOptions options_of(const whet_attention_options& o);

// Of a call of so many rows. Error if null.
AttentionGradients gradients_of(const whet_attention_gradients* given, std::size_t rows);

}  // namespace whet::c_api

#endif  // WHET_C_API_ATTENTION_H_
