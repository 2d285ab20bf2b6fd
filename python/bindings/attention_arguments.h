// The keyword arguments of attention, its gradient and its shards.
#ifndef WHET_PYTHON_ATTENTION_ARGUMENTS_H_
#define WHET_PYTHON_ATTENTION_ARGUMENTS_H_

#include <whet/attention.h>
#include <whet/shard.h>

#include <span>
#include <vector>

#include "options.h"

namespace whet_python {

struct AttentionArguments {
  whet::AttentionOptions options{};
  whet::AttentionOutputs outputs{};
  whet::AttentionBackwardOptions backward{};
  whet::Execution execution{};
  std::vector<whet::Rule> head_rules;  // what options.head_rules points to
  whet::AttentionGradients gradients{};
  whet::Shard shard{};
};

using AttentionTable = std::span<const Option<AttentionArguments>>;

AttentionTable attention_options();    // all but rule
AttentionTable attention_gradients();  // dq, dk, ...

}  // namespace whet_python

#endif  // WHET_PYTHON_ATTENTION_ARGUMENTS_H_
