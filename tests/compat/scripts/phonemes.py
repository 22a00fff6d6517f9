"""A CTC recogniser of labels, in the manner of SpeechBrain's TIMIT recipe."""

import os
import sys

from hyperpyyaml import load_hyperpyyaml

import sbkit as sb


class ASR_Brain(sb.Brain):
    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        wavs, wav_lens = batch.sig
        feats = self.hparams.compute_features(wavs)
        feats = self.modules.normalize(feats, wav_lens)
        out = self.modules.model(feats)
        out = self.modules.output(out)
        pout = self.hparams.log_softmax(out)
        return pout, wav_lens

    def compute_objectives(self, predictions, batch, stage):
        pout, pout_lens = predictions
        phns, phn_lens = batch.phn_encoded
        loss = self.hparams.compute_cost(pout, phns, pout_lens, phn_lens)
        if stage != sb.Stage.TRAIN:
            sequence = sb.decoders.ctc_greedy_decode(pout, pout_lens, blank_id=self.hparams.blank_index)
            self.per_metrics.append(ids=batch.id, predict=sequence, target=phns, target_len=phn_lens,
                                    ind2lab=self.label_encoder.decode_ndim)
        return loss

    def on_stage_start(self, stage, epoch):
        if stage != sb.Stage.TRAIN:
            self.per_metrics = self.hparams.per_stats()

    def on_stage_end(self, stage, stage_loss, epoch):
        if stage == sb.Stage.VALID:
            per = self.per_metrics.summarize("error_rate")
            self.checkpointer.save_and_keep_only(meta={"PER": per}, min_keys=["PER"])


def dataio_prep(hparams):
    datasets = [sb.dataio.dataset.DynamicItemDataset.from_csv(
        csv_path=os.path.join(hparams["data_folder"], f"{name}.csv")) for name in ("train", "dev", "test")]
    label_encoder = sb.dataio.encoder.CTCTextEncoder()

    @sb.utils.data_pipeline.takes("wav")
    @sb.utils.data_pipeline.provides("sig")
    def audio_pipeline(wav):
        return sb.dataio.dataio.read_audio(wav)

    @sb.utils.data_pipeline.takes("wrd")
    @sb.utils.data_pipeline.provides("phn_list", "phn_encoded")
    def text_pipeline(phn):
        phn_list = phn.strip().split()
        yield phn_list
        yield label_encoder.encode_sequence_torch(phn_list)

    sb.dataio.dataset.add_dynamic_item(datasets, audio_pipeline)
    sb.dataio.dataset.add_dynamic_item(datasets, text_pipeline)
    label_encoder.load_or_create(path=os.path.join(hparams["save_folder"], "label_encoder.txt"),
                                 from_didatasets=[datasets[0]], output_key="phn_list",
                                 special_labels={"blank_label": hparams["blank_index"]}, sequence_input=True)
    sb.dataio.dataset.set_output_keys(datasets, ["id", "sig", "phn_encoded"])
    return (*datasets, label_encoder)


if __name__ == "__main__":
    hparams_file, run_opts, overrides = sb.parse_arguments(sys.argv[1:])
    with open(hparams_file, encoding="utf-8") as fin:
        hparams = load_hyperpyyaml(fin, overrides)
    sb.create_experiment_directory(experiment_directory=hparams["output_folder"], hyperparams_to_save=hparams_file,
                                   overrides=overrides)
    train_data, valid_data, test_data, label_encoder = dataio_prep(hparams)
    asr_brain = ASR_Brain(modules=hparams["modules"], opt_class=hparams["opt_class"], hparams=hparams,
                          run_opts=run_opts, checkpointer=hparams["checkpointer"])
    asr_brain.label_encoder = label_encoder
    asr_brain.fit(asr_brain.hparams.epoch_counter, train_data, valid_data,
                  train_loader_kwargs=hparams["train_dataloader_opts"],
                  valid_loader_kwargs=hparams["valid_dataloader_opts"])
    asr_brain.evaluate(test_data, min_key="PER", test_loader_kwargs=hparams["test_dataloader_opts"])
