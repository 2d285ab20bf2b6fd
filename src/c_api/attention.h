// Attention's options from C, for attention and for shards.
#ifndef WHET_C_API_ATTENTION_H_
#define WHET_C_API_ATTENTION_H_

#include <whet/attention.h>
#include <whet/c_api.h>

namespace whet::c_api {

// All but head_rules, whose number depends on the call. The struct as known_part() gave it.
AttentionOptions options_of(const whet_attention_options& o);

}  // namespace whet::c_api

#endif  // WHET_C_API_ATTENTION_H_
