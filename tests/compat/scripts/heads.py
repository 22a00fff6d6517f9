"""A stranger's script: two CTC heads, torch's own log_softmax, a dict of outputs, and waveforms under another name."""

import sys

from hyperpyyaml import load_hyperpyyaml
from torch.nn import functional

import sbkit as sb


class Listener(sb.Brain):
    def compute_forward(self, batch, stage):
        audio, lengths = batch.to(self.device).audio
        states = self.modules.net(self.hparams.mel(audio))
        inner = functional.log_softmax(self.modules.inner_head(states), dim=-1)
        outer = self.modules.head(states).log_softmax(-1)
        best = [row.argmax(-1).tolist() for row in outer]
        return {"inner": inner, "outer": outer, "lengths": lengths, "best": best}

    def compute_objectives(self, outputs, batch, stage):
        letters, counts = batch.letters
        lengths = outputs["lengths"]
        return sum(sb.nnet.losses.ctc_loss(outputs[name], letters, lengths, counts, blank_index=0)
                   for name in ("inner", "outer"))

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage == sb.Stage.VALID:
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss}, min_keys=["loss"])


def main():
    hparams_file, run_opts, overrides = sb.parse_arguments(sys.argv[1:])
    with open(hparams_file, encoding="utf-8") as fin:
        hparams = load_hyperpyyaml(fin, overrides)
    sb.create_experiment_directory(hparams["output_folder"], hparams_file, overrides)
    encoder = hparams["letters"]
    encoder.update_from_iterable(["_low_high_both"], sequence_input=True)
    encoder.insert_blank(index=0)
    data = {}
    for split in ("train", "dev"):
        data[split] = sb.dataio.dataset.DynamicItemDataset.from_csv(f"{hparams['data_folder']}/{split}.csv")
        data[split].add_dynamic_item(sb.dataio.dataio.read_audio, takes="wav", provides="audio")
        data[split].add_dynamic_item(lambda text: encoder.encode_sequence_torch(text.replace(" ", "_")), takes="wrd",
                                     provides="letters")
        data[split].set_output_keys(["id", "audio", "letters"])
    brain = Listener(hparams["modules"], hparams["opt_class"], hparams, run_opts, hparams["checkpointer"])
    brain.fit(hparams["epoch_counter"], data["train"], data["dev"], train_loader_kwargs={"batch_size": 4},
              valid_loader_kwargs={"batch_size": 4})


if __name__ == "__main__":
    main()
