"""CTC beside an attention decoder, in the manner of SpeechBrain's transformer recipe for LibriSpeech."""

import sys
from pathlib import Path

import torch
from hyperpyyaml import load_hyperpyyaml

import sbkit as sb


class ASR(sb.core.Brain):
    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        wavs, wav_lens = batch.sig
        tokens_bos, _ = batch.tokens_bos
        feats = self.hparams.compute_features(wavs)
        current_epoch = self.hparams.epoch_counter.current
        feats = self.modules.normalize(feats, wav_lens, epoch=current_epoch)
        src = self.modules.CNN(feats)
        enc_out, pred = self.modules.Transformer(src, tokens_bos, wav_lens, pad_idx=self.hparams.pad_index)
        logits = self.modules.ctc_lin(enc_out)
        p_ctc = self.hparams.log_softmax(logits)
        pred = self.modules.seq_lin(pred)
        p_seq = self.hparams.log_softmax(pred)
        hyps = None
        if stage == sb.Stage.TEST:
            hyps, _, _, _ = self.hparams.test_search(enc_out.detach(), wav_lens)
        return p_ctc, p_seq, wav_lens, hyps

    def compute_objectives(self, predictions, batch, stage):
        p_ctc, p_seq, wav_lens, hyps = predictions
        tokens_eos, tokens_eos_lens = batch.tokens_eos
        tokens, tokens_lens = batch.tokens
        loss_seq = self.hparams.seq_cost(p_seq, tokens_eos, length=tokens_eos_lens).sum()
        loss_ctc = self.hparams.ctc_cost(p_ctc, tokens, wav_lens, tokens_lens).sum()
        if stage == sb.Stage.VALID:
            self.acc_metric.append(p_seq, tokens_eos, tokens_eos_lens)
        if stage == sb.Stage.TEST:
            predicted = [self.tokenizer.decode_ids(hyp).split(" ") for hyp in hyps]
            self.wer_metric.append(batch.id, predicted, [wrd.split(" ") for wrd in batch.wrd])
        return self.hparams.ctc_weight * loss_ctc + (1 - self.hparams.ctc_weight) * loss_seq

    def on_evaluate_start(self, max_key=None, min_key=None):
        super().on_evaluate_start()
        found = self.checkpointer.find_checkpoints(max_key=max_key, min_key=min_key, max_num_checkpoints=2)
        averaged = sb.utils.checkpoints.average_checkpoints(found, recoverable_name="model")
        self.hparams.model.load_state_dict(averaged, strict=True)
        self.hparams.model.eval()

    def on_stage_start(self, stage, epoch):
        if stage != sb.Stage.TRAIN:
            self.acc_metric = self.hparams.acc_computer()
            self.wer_metric = self.hparams.error_rate_computer()

    def on_stage_end(self, stage, stage_loss, epoch):
        if stage == sb.Stage.VALID:
            accuracy = self.acc_metric.summarize()
            self.checkpointer.save_and_keep_only(meta={"ACC": accuracy, "epoch": epoch}, max_keys=["ACC"],
                                                 num_to_keep=2)
        if stage == sb.Stage.TEST:
            Path(self.hparams.output_folder, "wer.txt").write_text(str(self.wer_metric.summarize("error_rate")))


def dataio_prepare(hparams):
    datasets = [sb.dataio.dataset.DynamicItemDataset.from_csv(
        csv_path=f"{hparams['data_folder']}/{name}.csv", replacements={"data_root": hparams["data_folder"]})
        for name in ("train", "dev", "test")]
    tokenizer = hparams["tokenizer"]

    @sb.utils.data_pipeline.takes("wav")
    @sb.utils.data_pipeline.provides("sig")
    def audio_pipeline(wav):
        return sb.dataio.dataio.read_audio(wav)

    @sb.utils.data_pipeline.takes("wrd")
    @sb.utils.data_pipeline.provides("wrd", "tokens_list", "tokens_bos", "tokens_eos", "tokens")
    def text_pipeline(wrd):
        yield wrd
        tokens_list = tokenizer.encode_as_ids(wrd)
        yield tokens_list
        yield torch.LongTensor([hparams["bos_index"], *tokens_list])
        yield torch.LongTensor([*tokens_list, hparams["eos_index"]])
        yield torch.LongTensor(tokens_list)

    sb.dataio.dataset.add_dynamic_item(datasets, audio_pipeline)
    sb.dataio.dataset.add_dynamic_item(datasets, text_pipeline)
    sb.dataio.dataset.set_output_keys(datasets, ["id", "sig", "wrd", "tokens_bos", "tokens_eos", "tokens"])
    return datasets


if __name__ == "__main__":
    hparams_file, run_opts, overrides = sb.parse_arguments(sys.argv[1:])
    with open(hparams_file, encoding="utf-8") as fin:
        hparams = load_hyperpyyaml(fin, overrides)
    sb.create_experiment_directory(experiment_directory=hparams["output_folder"], hyperparams_to_save=hparams_file,
                                   overrides=overrides)
    sb.utils.distributed.run_on_main(hparams["pretrainer"].collect_files)
    hparams["pretrainer"].load_collected()
    train_data, valid_data, test_data = dataio_prepare(hparams)
    asr_brain = ASR(modules=hparams["modules"], opt_class=hparams["Adam"], hparams=hparams, run_opts=run_opts,
                    checkpointer=hparams["checkpointer"])
    asr_brain.tokenizer = hparams["tokenizer"]
    asr_brain.fit(asr_brain.hparams.epoch_counter, train_data, valid_data,
                  train_loader_kwargs={"batch_size": 4}, valid_loader_kwargs={"batch_size": 4})
    for name in ("first", "second"):
        asr_brain.hparams.test_name = name
        asr_brain.evaluate(test_data, max_key="ACC", test_loader_kwargs={"batch_size": 4})
