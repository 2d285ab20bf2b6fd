// The commands of `whet`: each adds itself, with its options, help and callback. A new one is a file
// of its own, a line here and a line in main.cc. What goes wrong is thrown (whet::Error for wrong use,
// anything else for failure); only main.cc prints errors and exits.
#ifndef WHET_CLI_COMMANDS_H_
#define WHET_CLI_COMMANDS_H_

namespace CLI {
class App;
}

namespace whet::cli {

void add_softmax(CLI::App& app);  // softmax and sharpen, in softmax.cc
void add_demo(CLI::App& app);
void add_reproduce(CLI::App& app);  // these two in reproduce.cc
void add_eval(CLI::App& app);
void add_train(CLI::App& app);
void add_fit(CLI::App& app);  // these two in fit.cc
void add_calibrate(CLI::App& app);
void add_report(CLI::App& app);
void add_horizon(CLI::App& app);
void add_info(CLI::App& app);
void add_scale(CLI::App& app);
void add_bench(CLI::App& app);

// The rules by name, for the end of a help text.
inline constexpr const char* kRuleHelp =
    "Rules choose the inverse temperature beta of each row from its n visible keys and entropy H:\n"
    "  none                  beta = 1: plain softmax (the default)\n"
    "  paper                 the published polynomial in H, never below 1\n"
    "  fixed:B               beta = B\n"
    "  log-length:N0[,S]     beta = S ln n / ln N0, never below 1 (S = 1 if not given)\n"
    "  ssmax:S               beta = S ln n\n"
    "  log-power:D,B,G       beta = D + B (ln n)^G\n"
    "  llama4:N0[,S]         beta = 1 + S ln(floor(n / N0) + 1) (S = 0.1 if not given)\n"
    "  target-entropy:H      the beta >= 1 that brings the entropy down to H nats\n"
    "  target-peak:W         the beta >= 1 that brings the largest weight up to W\n"
    "  polynomial:C4,C3,C2,C1,C0[:gate=G][:hold=H]\n"
    "                        your own polynomial, highest power first\n"
    "  polynomial:FILE       the same line, read from FILE\n";

}  // namespace whet::cli

#endif  // WHET_CLI_COMMANDS_H_
